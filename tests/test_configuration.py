"""The help text of every option is at its field in a config class, and the documents show these texts."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import attrs
import pytest

import specdec_core.config
from specdec_core import Plugins
from specdec_core.config.options import Option, options_of, own_names

sys.path.append(str(Path(__file__).parents[1] / "docs"))

import option_tables

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CONFIGURATION = (DOCS / "configuration.md").read_text(encoding="utf-8")
TABLE = re.compile(r"<!-- options: (?!end)(.*?) -->\n")
SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
VAGUE = re.compile(r"\b(is|are|has|have|what is) none\b")


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load()


def core_classes() -> Iterator[type]:
    """Yield the config classes of `specdec_core.config` whose fields are options. Classes that are values of options
    are left out."""
    for module in pkgutil.iter_modules(specdec_core.config.__path__, "specdec_core.config."):
        for found in vars(importlib.import_module(module.name)).values():
            if isinstance(found, type) and found.__module__ == module.name and attrs.has(found):
                yield from [found] if found.__name__.endswith(("Config", "Params")) else []


def provided(plugins: Plugins) -> dict[str, type]:
    """Return the config classes of the installed plugins by kind and name, for example "proposer ngram"."""
    offers = [offer for plugin in plugins.listing() for offer in plugin.options]
    return {offer: option_tables.config_class(offer, plugins) for offer in offers}


def training_classes(plugins: Plugins) -> list[type]:
    specs = [plugins.proposer(offer.split()[1]) for offer in provided(plugins) if offer.startswith("proposer ")]
    return [spec.train.options for spec in specs if spec.train is not None]


def faults(config: type) -> list[str]:
    """Return a message for each field of a config class whose help text is missing or unclear."""
    found = []
    for attribute in attrs.fields(config):
        text, where = attribute.metadata.get("help", ""), f"{config.__name__}.{attribute.name}"
        if not text:
            found.append(f'{where} has no help: say at the field what it does, metadata={{"help": "..."}}')
        elif not text.endswith(".") or not 1 <= len(SENTENCE_END.findall(text)) <= 3:
            found.append(f"{where} is to be described in one to three sentences, not {text!r}")
        elif VAGUE.search(text):
            found.append(f"{where} says what is not there instead of what the option does: {text!r}")
    return found


def test_every_option_is_described(plugins):
    classes = {*core_classes(), *provided(plugins).values(), *training_classes(plugins)}
    assert {"EngineConfig", "SamplingParams", "NgramConfig", "TypicalConfig"} <= {each.__name__ for each in classes}
    assert [fault for each in classes for fault in faults(each)] == []


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({}, "Broken.depth has no help"),
        ({"allowed": "a number"}, "Broken.depth has no help"),
        ({"help": "levels"}, "in one to three sentences"),
        ({"help": "One. Two. Three. Four."}, "in one to three sentences"),
        ({"help": "What is none counts as 5."}, "instead of what the option does"),
    ],
)
def test_a_field_that_is_not_described_is_noticed(metadata, says):
    @attrs.frozen
    class Broken:
        depth: int = attrs.field(default=5, metadata=metadata)

    [fault] = faults(Broken)
    assert says in fault


def names_read(sources: Iterable[str]) -> set[str]:
    """Return the names of all attributes that the code in `sources` reads, of whatever object."""
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def ignored(options: Iterable[Option], read: set[str]) -> list[str]:
    """Return the names of options that no code reads.

    Options with only one allowed value are left out, and so are those whose help text declares that they change nothing
    or are refused.

    read: names of all attributes that code reads.
    """
    return [
        option.name
        for option in options
        if option.name not in read
        and option.allowed != option.default
        and not option.help.startswith(("Changes nothing: ", "Refused: "))
    ]


def test_an_option_that_nothing_reads_says_so(plugins):
    read = names_read(path.read_text() for path in ROOT.glob("*/**/specdec_*/**/*.py"))
    assert "max_num_seqs" in read
    for config in {*core_classes(), *provided(plugins).values()}:
        assert ignored(options_of(config), read) == [], config


def test_an_option_that_is_ignored_is_noticed():
    read = names_read(["def build(config):\n    config.written = config.read"])
    options = [
        Option("read", "an integer", "5", "Used."),
        Option("written", "an integer", "5", "Forgotten."),
        Option("only", "1", "1", "Only one value."),
        Option("honest", "an integer", "5", "Changes nothing: it is for show."),
    ]
    assert ignored(options, read) == ["written"]


def test_the_documents_say_what_the_fields_say():
    command = [sys.executable, DOCS / "option_tables.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def undocumented(text: str, classes: Iterable[type], resolve: Callable[[str], type]) -> list[str]:
    """Return the names of the classes that define options but have no table in a document.

    text: the document.
    resolve: a function that takes the name in a table and returns the class.
    """
    shown = {resolve(what.removesuffix(", its own")) for what in TABLE.findall(text)}
    parents = {parent for each in classes for parent in each.__mro__ if own_names(parent)}
    return sorted(each.__name__ for each in parents - shown)


def test_every_class_has_a_table(plugins):
    classes = {*core_classes(), *provided(plugins).values()}
    assert undocumented(CONFIGURATION, classes, lambda what: option_tables.config_class(what, plugins)) == []
    readmes = "".join(path.read_text(encoding="utf-8") for path in option_tables.DOCUMENTS if path.parent != DOCS)
    assert set(TABLE.findall(readmes)) <= provided(plugins).keys()
    shown = {option_tables.config_class(what, plugins) for what in TABLE.findall(readmes)}
    assert shown == {each for each in provided(plugins).values() if each.__module__.partition(".")[0] != "specdec_core"}


def test_a_class_without_a_table_is_noticed(plugins):
    @attrs.frozen
    class New:
        depth: int = 5

    text = CONFIGURATION.replace("<!-- options: verifier typical -->", "")
    found = undocumented(text, {*core_classes(), New}, lambda what: option_tables.config_class(what, plugins))
    assert found == ["New", "TypicalConfig"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("| `256` |", "| `255` |"),
        ("Tokens in a block of the KV cache.", "Tokens of a block."),
        ("| `seed` |", "| `sead` |"),
        ("| `n` | `1` | an integer from 1 to 16384 |", "| `n` | `1` | an integer |"),
    ],
)
def test_a_table_that_says_something_else_is_noticed(tmp_path, before, after):
    docs = tmp_path / "docs"
    shutil.copytree(DOCS, docs)
    path, command = docs / "configuration.md", [sys.executable, docs / "option_tables.py"]
    assert before in CONFIGURATION
    path.write_text(CONFIGURATION.replace(before, after), encoding="utf-8")
    result = subprocess.run([*command, "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "docs/configuration.md does not say what the fields say: run python docs/option_tables.py" in result.stderr
    subprocess.run(command, check=True)
    assert path.read_text(encoding="utf-8") == CONFIGURATION


def test_a_table_without_an_end_is_noticed(plugins):
    with pytest.raises(ValueError, match="a table of options does not end"):
        option_tables.written("<!-- options: EngineConfig -->\n\n| option |\n", plugins)
