"""docs/configuration.md names every key, with its default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from specdec_core import SamplingParams
from specdec_core.config import DraftModelConfig, EngineConfig, SpeculativeConfig
from specdec_core.verifiers.config import TypicalConfig
from specdec_proposer_draft import DraftConfig
from specdec_proposer_eagle import EagleConfig
from specdec_proposer_ngram import NgramConfig
from specdec_proposer_suffix import SuffixConfig

TEXT = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (?:`(.*?)`)? ?\|", re.MULTILINE)
UNSUPPORTED = re.search(r"Not supported yet[^:]*: (.*?)\.\n", TEXT, re.DOTALL)


def table_after(heading: str) -> dict[str, str | None]:
    """{key: default as it is written} of the first table after a line that contains `heading`."""
    table = TEXT[TEXT.index(heading) :].split("\n|---", 1)[1].split("\n\n", 1)[0]
    return dict(ROW.findall(table))


def defaults(config: type) -> dict[str, Any]:
    def shown(attribute: attrs.Attribute[Any]) -> str:
        if attribute.default is attrs.NOTHING:
            return ""
        default = attribute.converter(attribute.default) if attribute.converter else attribute.default
        return repr(default).replace("'", '"')

    return {attribute.name: shown(attribute) for attribute in attrs.fields(config)}


@pytest.mark.parametrize(
    ("config", "heading"),
    [
        (EngineConfig, "the keys of `EngineConfig`"),
        (SpeculativeConfig, "these keys, and the method's own"),
        (NgramConfig, "Method `ngram`"),
        (SuffixConfig, "Method `suffix`"),
        (DraftConfig, "Method `draft_model`"),
        (EagleConfig, "Methods `eagle`"),
        (TypicalConfig, "Verifier `typical`"),
        (DraftModelConfig, "the keys of `DraftModelConfig`"),
        (SamplingParams, "`SamplingParams(...)`, one for all"),
    ],
)
def test_every_key_and_its_default(config, heading):
    expected = defaults(config)
    if issubclass(config, DraftModelConfig) and config is not DraftModelConfig:  # those have a table of their own
        expected = {key: default for key, default in expected.items() if key not in defaults(DraftModelConfig)}
    for others in ("options", "verifier_options"):  # the method's own keys and the verifier's, in the same dict
        expected.pop(others, None)
    if config is SamplingParams:
        unsupported = set(re.findall(r"`(\w+)`", UNSUPPORTED[1]))
        not_yet = [a for a in attrs.fields(config) if getattr(a.validator, "__name__", "") == "_not_yet"]
        assert unsupported == {attribute.name for attribute in not_yet}
        expected = {name: default for name, default in expected.items() if name not in unsupported}
    assert table_after(heading) == expected
