"""Broken plugins: the warnings when plugins are loaded, and the errors when the broken one is requested."""

from __future__ import annotations

import sys
import warnings

import pytest

from specdec_core import PLUGIN_API, PluginError, PluginInfo, Plugins, PluginWarning

VERIFIERS = "from specdec_core import VerifierSpec, hookimpl\n@hookimpl\ndef specdec_verifiers():\n    return [%s]\n"


def load_quietly(**kwargs: object) -> Plugins:
    """Load the installed plugins. Any warning becomes an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Plugins.load(**kwargs)


def load_with_one_warning(match: str) -> Plugins:
    with pytest.warns(PluginWarning) as caught:
        plugins = Plugins.load()
    assert len(caught) == 1
    assert match in str(caught[0].message)
    assert caught[0].filename == __file__
    return plugins


def lines(plugins: Plugins, name: str) -> list[PluginInfo]:
    return [line for line in plugins.listing() if line.name == name]


def asked(plugins: Plugins, name: str) -> PluginError:
    with pytest.raises(PluginError) as caught:
        plugins.proposer(name)
    return caught.value


def test_working(site):
    site.proposer("works")
    plugins = load_quietly()
    assert plugins.proposer("works").name == "works"
    assert lines(plugins, "works") == [PluginInfo("works", "dist-works", "1.0", "ok", ("proposer works",), None)]


BROKEN = {
    "missing import": ("import no_such_module_anywhere", ModuleNotFoundError, "no_such_module_anywhere"),
    "syntax error": ("def f(:\n", SyntaxError, "SyntaxError"),
    "raises at import": ("raise RuntimeError('no licence')", RuntimeError, "RuntimeError: no licence"),
    "misspelt hook": (
        "from specdec_core import hookimpl\n@hookimpl\ndef specdec_propsers():\n    return []",
        PluginError,
        "did you mean specdec_proposers?",
    ),
    "unheard-of hook": (
        "from specdec_core import hookimpl\n@hookimpl\ndef zzz():\n    return []",
        PluginError,
        "the hooks are specdec_commands, specdec_grammars, specdec_kv_managers, specdec_ops, specdec_proposers, spec",
    ),
    "wrong signature": (
        "from specdec_core import hookimpl\n@hookimpl\ndef specdec_proposers(model):\n    return []",
        Exception,
        "model",
    ),
    "raises in the hook": (
        "from specdec_core import hookimpl\n@hookimpl\ndef specdec_proposers():\n    return 1 / 0",
        ZeroDivisionError,
        "division by zero",
    ),
    "not a list": (
        "from specdec_core import hookimpl\n@hookimpl\ndef specdec_proposers():\n    return 'broken'",
        PluginError,
        "specdec_proposers returned 'broken', not a list of ProposerSpec",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_cannot_be_loaded(site, case):
    source, original, text = BROKEN[case]
    site.plugin("broken", source)
    site.proposer("works")
    plugins = load_with_one_warning(text)
    assert plugins.proposer("works")
    error = asked(plugins, "broken")
    assert "'broken' (dist-broken 1.0) cannot be loaded" in str(error)
    assert text in str(error)
    assert "SPECDEC_DISABLE=dist-broken" in str(error)
    assert isinstance(error.__cause__, original)
    [line] = lines(plugins, "broken")
    assert (line.status, line.provides, line.error) == ("failed", (), str(error))


def test_no_hook_is_marked(site):
    site.plugin("bare", "def specdec_proposers():\n    return []")
    plugins = load_with_one_warning("no function of dist_bare_module that is marked @hookimpl")
    assert "offers nothing" in str(asked(plugins, "bare"))


def test_one_warning_for_a_module_of_several_methods(site):
    site.install("dist-two", {"one": "two_module", "two": "two_module"}, {"two_module": "import no_such_module"})
    plugins = load_with_one_warning("'one', 'two' (dist-two 1.0)")
    assert "no_such_module" in str(asked(plugins, "one"))
    assert "no_such_module" in str(asked(plugins, "two"))


def test_other_api(site):
    site.proposer("future", api=PLUGIN_API + 1)
    site.proposer("works")
    plugins = load_quietly()
    assert plugins.proposer("works")
    error = asked(plugins, "future")
    assert f"plugin API {PLUGIN_API + 1}, but this specdec-core has plugin API {PLUGIN_API}" in str(error)
    assert lines(plugins, "future")[0].status == "incompatible"


def test_two_distributions_one_name(site):
    site.proposer("twin", distribution="dist-left")
    site.proposer("twin", distribution="dist-right")
    plugins = load_quietly()
    error = asked(plugins, "twin")
    assert "dist-left 1.0 and dist-right 1.0" in str(error)
    assert [(line.distribution, line.status) for line in lines(plugins, "twin")] == [
        ("dist-left", "duplicate"),
        ("dist-right", "duplicate"),
    ]
    assert "dist_left_module" not in sys.modules


def test_disabling_one_of_two_distributions_settles_it(site):
    site.proposer("twin", distribution="dist-left")
    site.proposer("twin", distribution="dist-right")
    plugins = load_quietly(disable=["dist_Right"])
    assert plugins.proposer("twin")
    assert [line.status for line in lines(plugins, "twin")] == ["ok", "disabled"]


def test_one_distribution_found_twice_is_no_duplicate(site, second_site):
    site.proposer("again", distribution="Dist-Again")
    second_site.proposer("again", distribution="dist_again")
    plugins = load_quietly()
    assert plugins.proposer("again")
    assert [line.distribution for line in lines(plugins, "again")] == ["Dist-Again"]


def test_core_part_of_the_same_name(site):
    (site.path / "core_parts.py").write_text(
        VERIFIERS % 'VerifierSpec("mine", list, 1), VerifierSpec("other", list, 1)'
    )
    site.plugin("mine", VERIFIERS % 'VerifierSpec("mine", tuple, 1)')
    plugins = load_quietly(builtins=["core_parts"])
    assert plugins.verifier("other")
    with pytest.raises(PluginError, match=r"'mine' is claimed by specdec-core [\d.]+ and dist-mine 1.0"):
        plugins.verifier("mine")


def test_disabled_by_environment(site, monkeypatch):
    site.plugin("costly", "raise RuntimeError('imported')")
    site.proposer("works")
    monkeypatch.setenv("SPECDEC_DISABLE", "costly, ")
    plugins = load_quietly()
    assert "disabled by the environment variable SPECDEC_DISABLE, which names 'costly'" in str(asked(plugins, "costly"))
    assert lines(plugins, "costly")[0].status == "disabled"
    assert plugins.proposer("works")


@pytest.mark.parametrize("disable", ["costly,works", ["costly", "works"], ("dist-costly,works",)])
def test_disabled_by_argument(site, disable):
    site.plugin("costly", "raise RuntimeError('imported')")
    site.proposer("works")
    plugins = load_quietly(disable=disable)
    assert "disabled by the argument disable (--disable)" in str(asked(plugins, "costly"))
    assert "disabled" in str(asked(plugins, "works"))


def test_to_be_disabled_but_not_installed(site):
    with pytest.warns(UserWarning, match="names 'no-such-plugin', which is not installed"):
        Plugins.load(disable=["no-such-plugin"])


def test_unknown(site):
    site.proposer("lookahead")
    site.plugin("asleep", "")
    plugins = load_quietly(disable="asleep")
    error = str(asked(plugins, "lookahaed"))
    assert "unknown proposer 'lookahaed'. Did you mean 'lookahead'? Installed:" in error
    assert "lookahead" in error.split("Installed:")[1]
    assert "asleep (disabled)" in error


def test_required_module_is_missing(site):
    site.proposer("heavy", more=", requires=('attrs', 'absent_root.child', 'absent_too')")
    plugins = load_quietly()
    error = str(asked(plugins, "heavy"))
    assert "requires modules that are not installed: absent_root, absent_too" in error
    assert "pip install dist-heavy" in error
    [line] = lines(plugins, "heavy")
    assert (line.status, line.provides, line.error) == ("failed", ("proposer heavy",), error)


def test_required_modules_are_not_imported(site):
    site.install("dist-dependency", {}, {"heavy_dependency": "raise RuntimeError('imported')"})
    site.proposer("heavy", more=", requires=('heavy_dependency',)")
    assert load_quietly().proposer("heavy").requires == ("heavy_dependency",)


def test_spec_without_an_entry_point_of_its_name(site):
    site.plugin("method", VERIFIERS % 'VerifierSpec("rule", list, 1)')
    plugins = load_with_one_warning("offers the verifier 'rule', but dist-method has no entry point of that name")
    with pytest.raises(PluginError, match='add rule = "dist_method_module" to the entry points'):
        plugins.verifier("method")


def test_one_name_twice_in_one_plugin(site):
    site.plugin("same", VERIFIERS % 'VerifierSpec("same", list, 1), VerifierSpec("same", tuple, 1)')
    load_with_one_warning("offers the verifier 'same' twice")


def test_no_proposer_is_called_target(site):
    site.proposer("target")
    load_with_one_warning("offers the proposer 'target': that name stands for the target")


def test_asking_for_the_wrong_kind(site):
    site.proposer("works")
    with pytest.raises(PluginError, match=r"'works' \(dist-works 1.0\) offers no verifier, only: proposer works"):
        load_quietly().verifier("works")
