"""The fields of an observation that exist both on the device and on the host are equal, and reading the host fields
copies nothing from the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve, field, frozen

from specdec_core import LLM, Draft, Observation, Plan, Plugins, Proposer, ProposerSpec, SamplingParams
from specdec_core.engine import observer
from specdec_testing import tiny_target

Patch = pytest.MonkeyPatch
PROMPTS = [[3, 5, 7, 5, 7, 5], [11], [13, *range(30)]]
NUM_TOKENS = 12


@frozen
class Config:
    faults: list[str] = field(factory=list)  # what was wrong with an observation
    num_valid: list[int] = field(factory=list)


class Checking(Proposer):
    """A proposer that compares each observation with the requests' own tokens.

    It drafts the tokens that followed the previous occurrence of the request's last token.
    """

    def __init__(self, config: Config, context: Any) -> None:
        self.config, self.device = config, context.device
        self.announced: list[tuple[Any, int, int]] = []  # request, index of a token, the token

    def propose(self, batch: Any) -> Draft:
        chains = []
        for request, most in zip(batch.requests, batch.max_draft_tokens, strict=True):
            text = request.token_ids.tolist()
            before = [i for i, token in enumerate(text[:-1]) if token == text[-1]]
            chains.append(text[before[-1] + 1 :][:most] if before else [0] * most)
        return Draft.from_chains(chains, self.device)

    def observe(self, observation: Observation) -> None:
        for request, i, token in self.announced:
            self._check(int(request.token_ids[i]) == token, f"the token at {i} is another")
        self.announced = []
        self._check(observation.num_valid.dtype == torch.int32, "num_valid")
        self._check(observation.last_rows.dtype == torch.int64, "last_rows")
        self._check(tuple(observation.num_valid.tolist()) == observation.host_num_valid, "host_num_valid")
        self._check(tuple(observation.last_rows.tolist()) == observation.host_last_rows, "host_last_rows")
        for b, request in enumerate(observation.requests):
            first, start, n = observation.offsets[b], observation.starts[b], observation.host_num_valid[b]
            self.config.num_valid.append(n)
            seen = observation.token_ids[first : first + n].tolist()
            following = observation.following_token_ids[first : first + n].tolist()
            self._check(following[:-1] == seen[1:], "following tokens")
            self._check(following[-1] == int(observation.next_token_ids[b]), "the last row's following token")
            self._check(observation.host_last_rows[b] == first + n - 1, "the last row")
            pairs = enumerate([*seen, *following[-1:]], start)
            self.announced += [(request, i, token) for i, token in pairs if i < len(request.token_ids)]

    def _check(self, is_right: bool, what: str) -> None:
        if not is_right:
            self.config.faults.append(what)


class WithChecking:
    """Stands in for `Plugins`: the installed plugins and the proposer `Checking`."""

    def __init__(self) -> None:
        self._installed = Plugins.load()

    def proposer(self, name: str) -> Any:
        plan = lambda config, target, num_speculative_tokens: Plan(taps=("final",))  # noqa: E731
        return ProposerSpec("checking", Config, build=Checking, api=1, plan=plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._installed, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_target(tmp_path_factory.mktemp("target"))


def observed(folder: Any) -> Config:
    config = Config()
    options = {
        "method": "checking",
        "num_speculative_tokens": 3,
        "faults": config.faults,
        "num_valid": config.num_valid,
    }
    plugins: Any = WithChecking()
    settings: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "max_num_batched_tokens": 20}
    with LLM(folder, plugins=plugins, skip_tokenizer_init=True, speculative_config=options, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
        llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return config


def test_host_and_device_say_the_same(folder: Any) -> None:
    config = observed(folder)
    assert not config.faults
    assert {1, 2, 13} <= set(config.num_valid), "a refused draft, an accepted one, and a chunk of a prompt"


def test_nothing_is_fetched(folder: Any, monkeypatch: Patch) -> None:
    """Reading an observation's `following_token_ids`, or its counts on the host, copies no tensor from the device."""
    observation_of = observer.observation_of
    num_made = 0

    def refuse(*_: Any) -> Any:
        raise AssertionError("a tensor was fetched")

    def unfetched(*given: Any) -> Observation:
        nonlocal num_made
        observation = observation_of(*given)
        num_made += 1
        with monkeypatch.context() as patch:
            for name in ("tolist", "numpy", "item", "cpu", "__int__", "__index__", "__bool__", "__iter__"):
                patch.setattr(torch.Tensor, name, refuse)
            assert len(observation.following_token_ids) == observation.offsets[-1]
            assert len(observation.host_num_valid) == len(observation.host_last_rows) == len(observation.requests)
        return observation

    monkeypatch.setattr(observer, "observation_of", unfetched)
    observed(folder)
    assert num_made > NUM_TOKENS / 4


def test_host_copies_are_fetched_where_nobody_has_them() -> None:
    observation = Observation(
        requests=[None, None],  # type: ignore[list-item]
        starts=(4, 0),
        offsets=(0, 3, 5),
        num_valid=torch.tensor([2, 0], dtype=torch.int32),
        last_rows=torch.tensor([1, 3]),
        token_ids=torch.tensor([5, 6, 7, 8, 9]),
        positions=torch.tensor([4, 5, 6, 0, 1]),
        features={},
        next_token_ids=torch.tensor([1, 2]),
    )
    assert (observation.host_num_valid, observation.host_last_rows) == ((2, 0), (1, 3))
    assert observation.following_token_ids[:2].tolist() == [6, 1]


def _one_more_counts(seen: Observation) -> Observation:
    return evolve(seen, num_valid=seen.num_valid + 1)


def _the_host_has_older_numbers(seen: Observation) -> Observation:
    return evolve(seen, host_num_valid=tuple(max(1, n - 1) for n in seen.host_num_valid))


def _last_rows_are_another_requests(seen: Observation) -> Observation:
    return evolve(seen, last_rows=seen.last_rows.roll(1))


@pytest.mark.parametrize(
    "fault",
    [_one_more_counts, _the_host_has_older_numbers, _last_rows_are_another_requests],
    ids=lambda fault: fault.__name__,
)
def test_faults_are_noticed(fault: Callable[[Observation], Observation], folder: Any, monkeypatch: Patch) -> None:
    observation_of = observer.observation_of
    monkeypatch.setattr(observer, "observation_of", lambda *given: fault(observation_of(*given)))
    assert observed(folder).faults
