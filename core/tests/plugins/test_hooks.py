"""Every plugin hook, called through a plugin that is really installed."""

from __future__ import annotations

import inspect

import attrs
import pytest

from specdec_core import ConfigError, KVLayout, OpsContext, PluginError, Plugins, StepReport
from specdec_core.contracts import hooks as hookspecs

REPORT = StepReport(
    num_prefill_tokens=3, num_decode_requests=1, num_draft_tokens=4, num_accepted=2, draft_s=0.1, target_s=0.2
)
HEAD = """
import attrs
from specdec_core import GrammarSpec, KVManagerSpec, OpsSpec, ProposerSpec, VerifierSpec, hookimpl
"""
HOOKS = sorted(name for name, _ in inspect.getmembers(hookspecs, inspect.isfunction) if name.startswith("specdec_"))


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_is_documented_and_tested(hook):
    text = " ".join(inspect.getdoc(getattr(hookspecs, hook)).split())
    assert "Called" in text
    assert "Any plugin may implement it" in text
    for parameter in inspect.signature(getattr(hookspecs, hook)).parameters:
        assert f"{parameter}: " in text
    assert f"test_{hook}" in globals()


def test_specdec_proposers(site):
    """Two proposers of one distribution may share a module. Each has its own entry point and can be disabled alone."""
    source = HEAD + (
        "Options = attrs.make_class('Options', [])\n"
        "@hookimpl\n"
        "def specdec_proposers():\n"
        "    return [ProposerSpec(name=name, config=Options, build=print, api=1) for name in ('first', 'second')]\n"
    )
    site.install("dist-pair", {"first": "pair", "second": "pair"}, {"pair": source})
    plugins = Plugins.load(disable="second")
    assert plugins.proposer("first").build is print
    with pytest.raises(PluginError, match=r"'second' .* is disabled"):
        plugins.proposer("second")


def test_specdec_verifiers(site):
    site.plugin("rule", HEAD + "@hookimpl\ndef specdec_verifiers():\n    return [VerifierSpec('rule', list, 1, False)]")
    spec = Plugins.load().verifier("rule")
    assert (spec.name, spec.build, spec.lossless) == ("rule", list, False)


def test_specdec_kv_managers(site):
    site.plugin("pool", HEAD + "@hookimpl\ndef specdec_kv_managers():\n    return (KVManagerSpec('pool', print, 1),)")
    plugins = Plugins.load()
    assert plugins.kv_manager("pool").build is print
    [line] = [line for line in plugins.listing() if line.name == "pool"]
    assert line.provides == ("kv_manager pool",)


GRAMMAR = HEAD + "@hookimpl\ndef specdec_grammars():\n    return [GrammarSpec(%r, print, 1)]"


def test_specdec_grammars(site):
    site.plugin("rules", GRAMMAR % "rules")
    others = [line.name for line in Plugins.load().listing() if line.provides == ("grammar llguidance",)]
    assert Plugins.load(disable=others).grammar().name == "rules"
    site.plugin("more", GRAMMAR % "more")
    with pytest.raises(ConfigError, match="the grammars more and rules are installed, and one is used: disable all"):
        Plugins.load(disable=others).grammar()
    with pytest.raises(ConfigError, match=r"no plugin with a grammar is usable: install .* Not usable: .*more \(dis"):
        Plugins.load(disable=[*others, "rules", "more"]).grammar()


OPS = HEAD + "@hookimpl\ndef specdec_ops(device):\n    return OpsSpec(%s) if device == 'test' else None\n"
LAYERS = OpsContext("test", "float32", KVLayout(2, 1, 64, 32, "float32"))


def test_specdec_ops(site):
    site.plugin("fast-a", OPS % "api=1, ops={'gather': len}")
    site.plugin("fast-b", OPS % "api=1, ops={'scatter': sum}")
    plugins = Plugins.load()
    offered = plugins.ops("test")
    assert [offered.choose(name, LAYERS) for name in ("gather", "scatter", "sort")] == [len, sum, None]
    assert plugins.ops("other").choose("gather", LAYERS) is None
    [line] = [line for line in plugins.listing() if line.name == "fast-a"]
    assert line.provides == ("ops",)


def test_specdec_ops_replaced_twice(site):
    site.plugin("fast-a", OPS % "api=1, ops={'gather': len}")
    site.plugin("fast-b", OPS % "api=1, ops={'gather': sum}")
    said = r"'gather' is replaced by 'fast-a' \(dist-fast-a 1.0\) and by 'fast-b' \(.*SPECDEC_DISABLE=fast-b"
    with pytest.raises(PluginError, match=said):
        Plugins.load().ops("test").choose("gather", LAYERS)


def test_specdec_ops_for_some_layers(site):
    """A plugin's operation is used only for model layers that the plugin supports. Two plugins with the same operation
    conflict only for layers that both support."""
    narrow = "supports=lambda name, context: name == 'gather' and context.kv_layout.key_dim <= 64"
    half = "supports=lambda name, context: context.dtype == 'float16'"
    site.plugin("fast-a", OPS % f"api=1, ops={{'gather': len, 'sort': len}}, {narrow}")
    site.plugin("fast-b", OPS % f"api=1, ops={{'gather': sum}}, {half}")
    offered = Plugins.load().ops("test")
    wide = attrs.evolve(LAYERS, kv_layout=KVLayout(2, 1, 128, 32, "float32"))
    assert offered.choose("gather", LAYERS) is len
    assert offered.choose("sort", LAYERS) is None
    assert offered.choose("gather", wide) is None
    assert offered.choose("gather", attrs.evolve(wide, dtype="float16")) is sum
    with pytest.raises(PluginError, match="both support float16 layers with heads of 64 and 32 on test: disable one"):
        offered.choose("gather", attrs.evolve(LAYERS, dtype="float16"))


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        (
            "['gather']",
            r"returned \['gather'\], not an OpsSpec. Return OpsSpec\(api=1, ops={name: function}\), or None",
        ),
        ("{'gather': len, 'sort': sum}", r"Return OpsSpec\(api=1, ops={'gather': ..., 'sort': ...}\), or None"),
        ("OpsSpec(api=1, ops={'gather': 5})", r"ops \['gather'\] are no functions"),
        ("OpsSpec(api=1, ops={}, supports=('float32',))", r"supports=\('float32',\), which is no function"),
    ],
)
def test_specdec_ops_failing(site, result, said):
    site.plugin("fast", HEAD + f"@hookimpl\ndef specdec_ops(device):\n    return {result}\n")
    with pytest.raises(PluginError, match=rf"'fast' \(dist-fast 1.0\) failed .* for 'test': .*{said}") as caught:
        Plugins.load().ops("test")
    assert caught.value.__cause__ is not None
    assert "SPECDEC_DISABLE=fast" in str(caught.value)


def test_specdec_ops_of_another_api(site):
    """An OpsSpec (a plugin's operations) for another plugin API version is refused without reading its other fields."""
    site.plugin("fast", OPS % "api=2, ops=None")
    with pytest.raises(
        PluginError, match=r"'fast' \(dist-fast 1.0\) is written for plugin API 2, .*SPECDEC_DISABLE=fast"
    ):
        Plugins.load().ops("test")
    assert Plugins.load().ops("other").offers == ()


def test_specdec_ops_that_cannot_tell_what_they_support(site):
    site.plugin("fast", OPS % "api=1, ops={'gather': len}, supports=lambda name: True")
    with pytest.raises(
        PluginError, match=r"'fast' \(dist-fast 1.0\) failed to say whether its 'gather' supports float32"
    ):
        Plugins.load().ops("test").choose("gather", LAYERS)


def test_specdec_commands(site):
    source = HEAD + "import click\n@hookimpl\ndef specdec_commands():\n    return (click.Command('bake'),)\n"
    site.plugin("tools", source)
    plugins = Plugins.load()
    assert plugins.command("bake").name == "bake"
    assert plugins.command("boil") is None
    [line] = [line for line in plugins.listing() if line.name == "tools"]
    assert line.provides == ("command bake",)


def test_specdec_step_finished(site):
    source = HEAD + "heard = []\n@hookimpl\ndef specdec_step_finished(report):\n    heard.append(report)\n"
    for name in ("left", "right"):
        site.plugin(f"ear-{name}", source)
    plugins = Plugins.load()
    assert plugins.step_finished is not None
    plugins.step_finished(REPORT)
    import dist_ear_left_module
    import dist_ear_right_module

    assert dist_ear_left_module.heard == dist_ear_right_module.heard == [REPORT]


@pytest.mark.parametrize("fault", ["1 / 0", "raise SystemExit(3)"])
def test_specdec_step_finished_failing(site, fault):
    site.plugin("good", HEAD + "@hookimpl\ndef specdec_step_finished():\n    pass\n")
    site.plugin("bad", HEAD + f"@hookimpl\ndef specdec_step_finished(report):\n    {fault}\n")
    tell = Plugins.load().step_finished
    assert tell is not None
    with pytest.raises(PluginError, match=r"'bad' \(dist-bad 1.0\) failed to hear about a step: .*SPECDEC_DISABLE=bad"):
        tell(REPORT)


def test_specdec_step_finished_is_not_called_when_nobody_listens(site):
    site.plugin("ear", HEAD + "@hookimpl\ndef specdec_step_finished(report):\n    raise AssertionError\n")
    others = {line.name for line in Plugins.load(disable="ear").listing() if "step_finished" in line.provides}
    assert Plugins.load(disable=["ear", *others]).step_finished is None


DETECT = ", detect=lambda config, shapes: config.get('kind') == '{kind}' or {also}"


def test_detect(site):
    site.proposer("left", more=DETECT.format(kind="left", also="'shared' in shapes"))
    site.proposer("right", more=DETECT.format(kind="right", also="'shared' in shapes"))
    site.proposer("never")
    plugins = Plugins.load()
    assert plugins.detect({"kind": "left"}, {}).name == "left"
    assert plugins.detect({"kind": "right"}, {"head": (2, 3)}).name == "right"
    with pytest.raises(PluginError, match=r"claimed by 'left' \(dist-left 1.0\) and 'right' \(dist-right 1.0\)"):
        plugins.detect({}, {"shared": (1,)})
    with pytest.raises(PluginError, match=r"no installed proposer recognizes .* Installed: .*left"):
        plugins.detect({}, {})
    with pytest.raises(PluginError, match=r"The installed method 'left' does not, either: name it") as caught:
        plugins.detect({"model_type": "left"}, {})
    assert "install dist" not in str(caught.value)
    with pytest.raises(PluginError, match=r"model_type is 'suffix'. Name one as `method`, or install specdec-proposer"):
        Plugins.load(disable=["suffix"]).detect({"model_type": "suffix"}, {})


def test_detect_failing(site):
    site.proposer("left", more=", detect=lambda config, shapes: config['absent']")
    with pytest.raises(PluginError, match=r"'left' \(dist-left 1.0\) failed to look at the draft checkpoint") as caught:
        Plugins.load().detect({}, {})
    assert isinstance(caught.value.__cause__, KeyError)


def test_entry_point_may_name_an_object(site):
    source = HEAD + (
        "class Offer:\n"
        "    @hookimpl\n"
        "    def specdec_verifiers(self):\n"
        "        return [VerifierSpec('rule', list, 1)]\n"
        "offer = Offer()\n"
    )
    site.install("dist-object", {"rule": "object_module:offer"}, {"object_module": source})
    assert Plugins.load().verifier("rule").build is list


def test_builtin_modules_come_through_the_same_hooks(site):
    """Core's own plugin modules need no entry points, and their hooks may return specs with any names."""
    source = HEAD + "@hookimpl\ndef specdec_verifiers():\n    return [VerifierSpec(n, list, 1) for n in ('one', 'two')]"
    (site.path / "core_parts.py").write_text(source)
    plugins = Plugins.load(builtins=["core_parts"])
    assert plugins.verifier("one").name == "one"
    first = plugins.listing()[0]
    assert (first.name, first.distribution) == ("core_parts", "specdec-core")
    assert first.provides == ("verifier one", "verifier two")
