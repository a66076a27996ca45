"""Config files in TOML, JSON and YAML."""

from __future__ import annotations

import inspect
import json
import string
from contextlib import suppress

import pytest
import yaml
from hypothesis import given, strategies as st

from specdec_core import LLM, ConfigError, load_config_file
from specdec_core.config.file import KEYS

CONFIG = {
    "model": "tiny",
    "dtype": "float32",
    "max_num_seqs": 4,
    "gpu_memory_utilization": 0.5,
    "trust_remote_code": False,
    "speculative_config": {"method": "bigram", "num_speculative_tokens": 3, "most": 2},
}
TOML = """\
model = "tiny"
dtype = "float32"
max_num_seqs = 4
gpu_memory_utilization = 0.5
trust_remote_code = false

[speculative_config]
method = "bigram"
num_speculative_tokens = 3
most = 2
"""


@pytest.fixture(scope="module")
def load_text(tmp_path_factory):
    """Return a function that writes text to a config file with a given suffix and loads the file."""
    folder = tmp_path_factory.mktemp("config")

    def load(suffix, content):
        path = folder / f"config{suffix}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_config_file(path)

    return load


def test_three_formats_say_the_same(load_text):
    assert load_text(".toml", TOML) == CONFIG
    assert load_text(".json", json.dumps(CONFIG)) == CONFIG
    assert load_text(".yaml", yaml.safe_dump(CONFIG)) == CONFIG
    assert load_text(".YML", "\ufeff" + yaml.safe_dump(CONFIG)) == CONFIG


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[
            ("1e-3", 0.001),
            ("-2.5E+1", -25.0),
            (".inf", float("inf")),
            ("4.", 4.0),
            ("010", 10),
            ("0x10", 16),
            ("0o10", 8),
        ],
        *[(text, text) for text in ("1:40", "off", "No", "y", "1_000", "2026-01-02", "=", "<<", "e3", "0b1")],
        *[("true", True), ("FALSE", False), ("~", None), ("", None), ("Null", None), ("'1'", "1")],
    ],
)
def test_values_are_those_of_yaml_1_2(load_text, text, value):
    (found,) = load_text(".yaml", f"model: {text}").values()
    assert (found, type(found)) == (value, type(value))


def test_yaml_may_share_parts(load_text):
    text = "speculative_config: &one {method: bigram, num_speculative_tokens: 3}\nmodel: *one\n"
    assert load_text(".yaml", text)["model"] == {"method": "bigram", "num_speculative_tokens": 3}


def test_a_missing_file_is_not_blamed_for_its_suffix(tmp_path):
    with pytest.raises(ConfigError, match="nope' cannot be read: No such file"):
        load_config_file(tmp_path / "nope")


def test_keys_are_those_of_llm():
    own = {p.name for p in inspect.signature(LLM).parameters.values() if p.kind is not p.VAR_KEYWORD}
    assert own - {"plugins"} <= KEYS


@pytest.mark.parametrize(
    ("suffix", "content", "says"),
    [
        (".txt", "", "has no known suffix: allowed are .json, .toml, .yaml, .yml"),
        (".toml", "model = 'a'\nmodel = 'b'", "cannot be read as TOML: Cannot overwrite a value"),
        (".toml", "model = 'a'\n\nmax_num_seqs = ?", "at line 3"),
        (".toml", b"model = '\xff'", "is not UTF-8 text: byte 9"),
        (".json", '{"model": "a",\n "model": "b"}', "key 'model' is given twice"),
        (".json", '{"model": {"a": 1, "a": 2}}', "key 'a' is given twice"),
        (".json", '{"model": "a",\n "dtype"}', "line 2 column 9"),
        (".json", "[" * 100_000, "cannot be read as JSON"),
        (".json", "[]", "holds []: give keys with values"),
        (".yaml", "", "holds None: give keys with values"),
        (".yaml", "model: a\ndtype: float32\nmodel: b", "key 'model' in line 3 was in line 1 already"),
        (".yaml", "speculative_config:\n  method: a\n  method: b", "key 'method' in line 3 was in line 2 already"),
        (".yaml", "model: [{a: 1, a: 2}]", "key 'a' in line 1 was in line 1 already"),
        (".yaml", "model: [\n", "line 2"),
        (".yaml", "model: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        (".yaml", "1: 2", "has no key 1"),
        (".toml", "modle = 'tiny'", "has no key 'modle': did you mean 'model'?"),
        (".toml", "plugins = 'x'", "has no key 'plugins'"),
        (".toml", "speculative_config = 'ngram'", "speculative_config='ngram': give a table"),
        (".toml", "[speculative_config]", "speculative_config={}: give a table with method, num_speculative_tokens"),
    ],
)  # fmt: skip
def test_bad_files_are_named(load_text, suffix, content, says):
    with pytest.raises(ConfigError) as caught:
        load_text(suffix, content)
    assert says in str(caught.value)
    assert f"config{suffix}'" in str(caught.value)
    assert "\n" not in str(caught.value)


LEVELS = [f"*{name}, " * 9 for name in "abcdefgh"]
LISTS = [f"&{name} [{level}]" for name, level in zip("abcdefghi", ["x", *LEVELS], strict=True)]
MERGES = [f"&{name} {{<<: [{level}]}}" for name, level in zip("bcdefghi", LEVELS, strict=True)]
KEYED = "".join(f"{index}: {each}\n" for index, each in enumerate(LISTS))


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"- {each}\n" for each in LISTS),
        f"{KEYED}model: *i",
        f"{KEYED}? *i\n: x",
        "".join(f"{index}: {each}\n" for index, each in enumerate(["&a {x: 1}", *MERGES])),
    ],
    ids=["list", "value", "key", "merged"],
)
def test_a_few_lines_that_stand_for_billions_of_values(load_text, text):
    with pytest.raises(ConfigError, match=r"more than 100000 values, those behind aliases counted each time"):
        load_text(".yaml", text)


def test_a_yaml_file_may_hold_itself(load_text):
    with pytest.raises(ConfigError, match=r"holds \[\[\[\[.*\.\.\.: give keys"):
        load_text(".yaml", "&a [*a, *a]")


@pytest.mark.parametrize("name", ["missing.toml", "folder.toml"])
def test_files_that_cannot_be_read(tmp_path, name):
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match=f"{name}' cannot be read: "):
        load_config_file(tmp_path / name)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(string.printable),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(string.ascii_letters), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(KEYS - {"speculative_config"})), values, min_size=1))
def test_what_is_written_is_read(load_text, config):
    assert load_text(".json", json.dumps(config)) == config
    quoted = yaml.safe_dump(config, default_style='"')  # with tags: PyYAML would write the text 1e3 without quotes
    assert load_text(".yaml", quoted) == config


@given(
    st.binary(max_size=40) | st.text(":{}[]&*!-'\"\n ab1=.,").map(str.encode),
    st.sampled_from([".toml", ".json", ".yaml"]),
)
def test_anything_else_is_a_config_error(load_text, content, suffix):
    with suppress(ConfigError):
        load_text(suffix, content)
