"""The plugins in examples/plugins: each is installed, found, keeps the kit's rules, and drafts as its paper describes.

Token Recycling and LogitSpec are compared with references that know the target from transformers only.
"""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import pytest
import torch

from specdec_core import DEAD, LLM, Draft, DraftTree, Plugins, SamplingParams
from specdec_testing import ProposerConformance, tiny_target

EXAMPLES = sorted(path.parent for path in Path(__file__).parents[1].glob("examples/plugins/*/pyproject.toml"))
PHRASES = {"phrase_cache_phrases": [[i % 48, i // 48, 7] for i in range(48 * 48)]}
METHODS: dict[str, dict[str, Any]] = {"logitspec": {}, "phrase_cache": PHRASES, "token_recycling": {}}
PROMPTS = [[3, 4, 3, 4, 5, 5, 5, i] for i in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SEEDED = SamplingParams(temperature=0.8, max_tokens=12, seed=3)


def module_of(example: Path) -> str:
    return example.name.replace("-", "_")


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the examples in a folder of their own, which this process finds plugins in until the fixture ends."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps",
           "--no-build-isolation", "--no-compile", "--target", str(folder)]  # fmt: skip
    copies = tmp_path_factory.mktemp("sources")  # setuptools leaves files beside what it builds
    for example in EXAMPLES:
        copy = copies / example.name
        copy.mkdir()
        for path in example.iterdir():
            if path.is_file():
                (copy / path.name).write_bytes(path.read_bytes())
    done = subprocess.run([*pip, *map(str, sorted(copies.iterdir()))], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for example in EXAMPLES:
        sys.modules.pop(module_of(example), None)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def make_llm(target: Path, config: dict[str, Any] | None = None) -> LLM:
    fixed = config and {"adaptive_draft_length": False, **config}
    return LLM(target, dtype="float32", num_kv_blocks=200, speculative_config=fixed, skip_tokenizer_init=True)


def generate(llm: LLM, params: SamplingParams) -> list[Any]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)


# Each example's own test file has the kit's class: they are run from here, too.
for example in EXAMPLES:
    name = f"test_{module_of(example)}"
    spec = importlib.util.spec_from_file_location(name, example / f"{name}.py")
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    kits = [each for each in vars(tests).values() if isinstance(each, type) and each is not ProposerConformance]
    globals().update({kit.__name__: kit for kit in kits})


@pytest.mark.parametrize("method", METHODS)
def test_its_entry_point_is_found(method: str, installed: Path) -> None:
    (found,) = (plugin for plugin in Plugins.load().listing() if plugin.name == method)
    assert (found.status, found.distribution) == ("ok", f"specdec-proposer-{method.replace('_', '-')}")
    assert found.provides == (f"proposer {method}",)


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


class Asked(NamedTuple):
    """A request in a call of `propose`, and the tree that it got."""

    id: str
    token_ids: list[int]
    most: int
    tree: DraftTree


Call = list[Asked] | dict[str, list[int]]
"""A call of `propose`, or one of `observe`: {request id: its tokens before the forward pass, the last one its root}."""


def recorded(module: str, target: Path, config: dict[str, Any], patch: pytest.MonkeyPatch, fault: Any) -> list[Call]:
    """Run all prompts greedily in one batch, and return the proposer's calls in order. fault: what to break first."""
    plugin, calls = importlib.import_module(module), []
    proposer = next(each for each in vars(plugin).values() if hasattr(each, "observe") and each.__module__ == module)
    if fault is not None:
        fault(proposer, patch)
    propose, observe = proposer.propose, proposer.observe

    def recording_propose(self: Any, batch: Any) -> Draft:
        draft = propose(self, batch)
        each = zip(batch.requests, batch.max_draft_tokens, strict=True)
        calls.append([Asked(r.id, r.token_ids.tolist(), most, draft.tree(i)) for i, (r, most) in enumerate(each)])
        return draft

    def recording_observe(self: Any, observation: Any) -> None:
        assert observation.top_tokens is not None
        calls.append({request.id: request.token_ids.tolist() for request in observation.requests})
        observe(self, observation)

    patch.setattr(proposer, "propose", recording_propose)
    patch.setattr(proposer, "observe", recording_observe)
    generate(make_llm(target, config), GREEDY)
    return calls


@pytest.fixture(scope="module")
def likely(target: Path) -> Callable[[list[int]], list[int]]:
    """Return a function that takes tokens and returns all tokens that may follow, transformers' likeliest first."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)

    @torch.inference_mode()
    def run(token_ids: list[int]) -> list[int]:
        return model(torch.tensor([token_ids])).logits[0, -1].argsort(descending=True).tolist()

    return run


def texts(token_ids: list[int], tree: DraftTree) -> Iterator[list[int]]:
    """Yield what the target's logits after the root and after each node follow: the text up to it."""
    found = [token_ids]
    for token_id, parent in zip(*tree, strict=True):
        found.append([*found[parent + 1], token_id])
    yield from found


SHAPE = [(0,), (0, 0), (1,), (0, 0, 0), (2,), (0, 1), (1, 0)]
"""The seven likeliest paths of ranks below 3, with chances of 0.5, 0.25, 0.19, 0.125, 0.107, 0.095 and 0.095."""


def recycled(root: int, matrix: dict[int, list[int]], most: int) -> DraftTree:
    """Draft by Token Recycling's description: from the root on, look up each node's likeliest next tokens."""
    tree, placed = DraftTree([], []), {(): (-1, root)}
    for path in SHAPE:
        index, token_id = placed.get(path[:-1], (None, None))
        if token_id in matrix and len(tree.token_ids) < most:
            placed[path] = (len(tree.token_ids), matrix[token_id][path[-1]])
            tree.token_ids.append(matrix[token_id][path[-1]])
            tree.parents.append(index)
    return tree


def check_token_recycling(target: Path, likely: Any, patch: pytest.MonkeyPatch, fault: Any = None) -> int:
    config = {"method": "token_recycling", "num_speculative_tokens": len(SHAPE), "token_recycling_top_k": 3}
    matrix: dict[int, list[int]] = {}
    drafted: dict[str, DraftTree] = {}
    num_nodes = 0
    for call in recorded("token_recycling", target, config, patch, fault):
        if isinstance(call, dict):
            for name, token_ids in call.items():
                for text in texts(token_ids, drafted.pop(name, DraftTree([], []))):
                    matrix[text[-1]] = likely(text)
            continue
        for asked in call:
            assert asked.tree == recycled(asked.token_ids[-1], matrix, asked.most)
            drafted[asked.id] = asked.tree
            num_nodes += len(asked.tree.token_ids)
    return num_nodes


def retrieved(token_ids: list[int], guessed: list[int]) -> list[int]:
    """Return what followed the text's longest suffix of at most three tokens when it last occurred."""
    text = token_ids + guessed
    for n in (3, 2, 1):
        for end in range(len(token_ids) - 1, n - 1, -1):
            if len(text) >= n and token_ids[end - n : end] == text[-n:]:
                return token_ids[end : end + 6]
    return []


def guessed(token_ids: list[int], likeliest: list[int], most: int) -> DraftTree:
    """Draft by LogitSpec's description: the match after the root, then each guess with the match after it."""
    branches = [retrieved(token_ids, [])]
    for rank, guess in enumerate(likeliest):
        if guess != token_ids[-1]:
            branches.append([guess, *retrieved(token_ids, [guess])][: 4 if rank <= 8 else 3])
    prefixes = [tuple(branch[: i + 1]) for branch in branches for i in range(len(branch))]
    nodes = list(dict.fromkeys(prefixes))[:most]
    return DraftTree([node[-1] for node in nodes], [nodes.index(node[:-1]) if node[1:] else -1 for node in nodes])


def check_logitspec(target: Path, likely: Any, patch: pytest.MonkeyPatch, fault: Any = None) -> int:
    config = {"method": "logitspec", "num_speculative_tokens": 16, "logitspec_top_k": 11}
    num_nodes = 0
    for call in recorded("logitspec", target, config, patch, fault):
        for asked in call if isinstance(call, list) else ():
            assert asked.tree == guessed(asked.token_ids, likely(asked.token_ids[:-1])[:11], asked.most)
            num_nodes += len(asked.tree.token_ids)
    return num_nodes


CHECKS = {"token_recycling": check_token_recycling, "logitspec": check_logitspec}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_drafts_are_those_of_a_reference(
    check: Any, target: Path, likely: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(target, likely, monkeypatch) > 50


def rejected_nodes_only(proposer: Any, patch: pytest.MonkeyPatch) -> None:
    observe = proposer.observe

    def changed(self: Any, observation: Any) -> None:
        top, parents = observation.top_tokens, observation.top_tokens.parents.clone()
        first = dict(zip(observation.requests, observation.offsets, strict=False))
        for row, (number, position) in enumerate(zip(top.requests.tolist(), top.positions.tolist(), strict=True)):
            index = position - observation.starts[number]
            final = observation.token_ids[first[observation.requests[number]] :][: observation.host_num_valid[number]]
            if index < len(final) and final[index] == top.token_ids[row]:
                parents[row] = DEAD
        observe(self, attrs.evolve(observation, top_tokens=attrs.evolve(top, parents=parents)))

    patch.setattr(proposer, "observe", changed)


def parents_off_by_one(proposer: Any, patch: pytest.MonkeyPatch) -> None:
    propose = proposer.propose

    def changed(self: Any, batch: Any) -> Draft:
        draft = propose(self, batch)
        return attrs.evolve(draft, parents=(draft.parents - 1).clamp(min=-1), is_chain=False)

    patch.setattr(proposer, "propose", changed)


def top_tokens_of_another_request(proposer: Any, patch: pytest.MonkeyPatch) -> None:
    observe = proposer.observe

    def changed(self: Any, observation: Any) -> None:
        top = observation.top_tokens
        other = (top.requests + 1) % len(observation.requests)
        observe(self, attrs.evolve(observation, top_tokens=attrs.evolve(top, requests=other)))

    patch.setattr(proposer, "observe", changed)


FAULTS = [
    ("token_recycling", rejected_nodes_only),
    ("token_recycling", parents_off_by_one),
    ("logitspec", parents_off_by_one),
    ("logitspec", top_tokens_of_another_request),
]


@pytest.mark.parametrize(("method", "fault"), FAULTS)
def test_faults_are_noticed(
    method: str, fault: Any, target: Path, likely: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError):
        CHECKS[method](target, likely, monkeypatch, fault)


@pytest.mark.parametrize(("num_nodes", "top_k"), [(1, 1), (7, 3), (12, 8), (80, 8), (80, 2)])
def test_the_static_tree_has_the_likeliest_paths(num_nodes: int, top_k: int) -> None:
    static_tree = importlib.import_module("token_recycling").static_tree

    def chance(path: tuple[int, ...]) -> float:
        return math.prod(0.5 / (rank + 1) ** 1.4 for rank in path)

    def likelier(than: float, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
        for longer in ((*path, rank) for rank in range(top_k)):
            if chance(longer) > than:
                yield longer
                yield from likelier(than, longer)

    found = static_tree(num_nodes, top_k)
    assert len(set(found)) == num_nodes
    assert set(likelier(min(map(chance, found)) * (1 + 1e-9))) <= set(found)
    assert all(path[:-1] in ((), *found[:i]) for i, path in enumerate(found))
