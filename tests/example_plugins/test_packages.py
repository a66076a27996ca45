"""Each example is installed as anyone's package would be, found by its entry point, and keeps the kit's rules."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from packages import EXAMPLES, GREEDY, RELAXED, SEEDED, generate, make_llm, module_of

from specdec_core import Plugins, SamplingParams

PHRASES = {"phrase_cache_phrases": [[i % 48, i // 48, *range(9)] for i in range(2304)]}
METHODS: dict[str, dict[str, Any]] = {"logitspec": {}, "phrase_cache": PHRASES, "token_recycling": {}}

# Each example's own test file has the kit's class: they are run from here, too.
for example in EXAMPLES:
    name = f"test_{module_of(example)}"
    spec = importlib.util.spec_from_file_location(name, example / f"{name}.py")
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    globals().update({name: kit for name, kit in vars(tests).items() if name.startswith("Test")})


@pytest.mark.parametrize(("name", "kind"), [*((method, "proposer") for method in METHODS), (RELAXED, "verifier")])
def test_its_entry_point_is_found(name: str, kind: str) -> None:
    (found,) = (plugin for plugin in Plugins.load().listing() if plugin.name == name)
    assert (found.status, found.distribution) == ("ok", f"specdec-{kind}-{name.replace('_', '-')}")
    assert found.provides == (f"{kind} {name}",)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_its_own_test_has_three_lines(example: Path) -> None:
    lines = (example / f"test_{module_of(example)}.py").read_text().splitlines()
    assert len([*filter(None, lines)]) == 3


def test_the_phrase_cache_is_as_short_as_the_documents_promise() -> None:
    (folder,) = (example for example in EXAMPLES if example.name == "phrase-cache")
    assert len((folder / "phrase_cache.py").read_text().splitlines()) <= 40
    assert len((folder / "pyproject.toml").read_text().splitlines()) <= 15


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_its_readme_works(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", (example / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(example / "README.md"), "exec"), {})


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("method", METHODS)
def test_output_is_that_of_plain_decoding(method: str, params: SamplingParams, target: Path) -> None:
    plain = generate(make_llm(target), params)
    found = generate(make_llm(target, {"method": method, **METHODS[method]}), params)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in plain]
    assert all(each.lossless for each in found)
    assert sum(each.speculation.num_draft_tokens for each in found) > 0
