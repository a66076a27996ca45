"""An error shows the beginning of a value, however long, deep or unprintable it is, and never writes all of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from nested_values import Counted, nested

from specdec_core import LLM, ConfigError, PluginError, SamplingParams, SpecdecError
from specdec_core.api.arguments import prepare
from specdec_core.api.old_vllm_arguments import OLD_KEYS
from specdec_core.config.file import KEYS

ROOT = Path(__file__).parents[1]
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("not ready")


@pytest.mark.parametrize("name", [attribute.name for attribute in attrs.fields(SamplingParams)])
@pytest.mark.parametrize(
    "value", [10**5000, Unprintable(), "x" * 10**6, np.float64("inf")], ids=["digits", "no repr", "long", "infinite"]
)
def test_values_that_no_error_could_show(name: str, value: Any) -> None:
    if name in ("stop", "bad_words", "speculative_methods", "prediction") and isinstance(value, str):
        return
    with pytest.raises(ConfigError, match=name) as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 500


LONG = "x" * 10**6
LONG_VALUES = [
    {"model": LONG},
    {"tokenizer": LONG},
    {"device": LONG},
    {"revision": LONG},
    {"kv_manager": LONG},
    {"speculative_config": {**NGRAM, "method": LONG}},
    {"speculative_config": {**NGRAM, "verifier": LONG}},
    {"speculative_config": {"method": "eagle3", "model": LONG}},
]


@pytest.mark.parametrize("keywords", LONG_VALUES, ids=lambda keywords: next(iter(keywords)))
def test_long_names_are_not_shown_whole(keywords: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, PluginError)) as caught:
        LLM(**{"model": "tiny", **keywords})
    assert len(str(caught.value)) < 2000


PLACES: list[Callable[[Any], Any]] = [
    lambda value: value,
    lambda value: {"a": value},
    lambda value: {"quant_method": value},
    lambda value: {"quant_method": "fp8", "activation_scheme": value},
    lambda value: {"load_in_4bit": value},
]


@pytest.mark.parametrize("keyword", sorted(KEYS | OLD_KEYS | {"plugins", "nosuch", "hf_overrides", "swap_space"}))
@pytest.mark.parametrize("place", range(len(PLACES)))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # old keywords
def test_no_keyword_writes_a_whole_value(keyword: str, place: int) -> None:
    value = PLACES[place](nested(5, Counted()))
    Counted.num_written = 0
    with suppress(SpecdecError):
        prepare(**{"model": "tiny", "device": "cpu", keyword: value})
    assert Counted.num_written < 1000


@pytest.mark.parametrize("keyword", ["method", "model", "verifier", "revision", "num_speculative_tokens", "nosuch"])
@pytest.mark.parametrize("place", range(len(PLACES)))
def test_no_key_of_speculative_config_writes_a_whole_value(keyword: str, place: int) -> None:
    value = PLACES[place](nested(5, Counted()))
    Counted.num_written = 0
    with pytest.raises(SpecdecError):
        prepare("tiny", speculative_config={**NGRAM, keyword: value})
    assert Counted.num_written < 1000


def test_one_function_shows_values() -> None:
    """Only the module that defines `shown` shortens the repr of a value for an error message."""
    sources = [path for path in ROOT.glob("**/specdec_*/**/*.py") if "build" not in path.parts]
    assert len(sources) > 100
    for path in sources:
        assert not re.search(r"!r:\.|\breprlib\b", path.read_text()), path
