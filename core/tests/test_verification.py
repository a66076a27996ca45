"""The choice of the verifier, and the verifiers' results for requests that have no draft."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from specdec_core import ConfigError, PluginError, Plugins, SamplingParams
from specdec_core.config.speculative import SpeculativeConfig
from specdec_core.contracts.draft import DEAD, Draft, DraftTree
from specdec_core.contracts.verifier import Verdict, VerifierSpec
from specdec_core.engine.verification import Verification, _on_host
from specdec_core.sampling.process import process_logits
from specdec_core.sampling.random import CounterRandom
from specdec_testing.pretend_cuda import CUDA, PretendCuda

GREEDY, SAMPLED = SamplingParams(temperature=0), SamplingParams(temperature=0.7)
Q = {"q": torch.full((1, 4), 0.25), "q_rows": torch.zeros(2, dtype=torch.int32)}
NOTHING = Draft.from_chains([[]])
CHAIN = Draft.from_chains([[1, 2]])
TREE = Draft.from_trees([DraftTree([1, 2], [-1, -1])])
DRAWN_CHAIN, DRAWN_TREE = (attrs.evolve(draft, **Q) for draft in (CHAIN, TREE))


def verification(**keys: Any) -> Verification:
    plugins = Plugins.load()
    name = keys.get("verifier", "auto")
    verifier_config = None if name == "auto" else plugins.verifier(name).config
    mapping = {"method": "mine", "num_speculative_tokens": 2, **keys}
    return Verification(plugins, SpeculativeConfig.from_mapping(mapping, attrs.make_class("Mine", []), verifier_config))


@pytest.mark.parametrize(
    ("draft", "auto", "named"),
    [
        (NOTHING, "chosen", "chosen"),
        (CHAIN, "chosen", "rejection"),
        (TREE, "chosen", "rejection"),
        (DRAWN_CHAIN, "block", "rejection"),
        (DRAWN_TREE, "traversal", "rejection"),
        (attrs.evolve(DRAWN_TREE, parents=torch.full_like(TREE.parents, DEAD)), "chosen", "chosen"),
    ],
)
def test_the_choice(draft: Draft, auto: str, named: str) -> None:
    assert verification().choose(draft, [GREEDY, SAMPLED]) == auto
    assert verification(verifier="rejection").choose(draft, [SAMPLED]) == named
    assert verification(verifier="rejection").choose(draft, [GREEDY, GREEDY]) == "greedy"


@pytest.mark.parametrize("name", ["auto", "rejection", "block", "traversal", "typical"])
def test_what_others_draft_changes_no_tokens(name: str) -> None:
    """The drafts of other requests in a batch do not change the tokens of a request without a draft.

    With the verifier "auto" this also holds for a request with a deterministic (not sampled) draft.
    """
    check_that_others_do_not_matter(name, [[1], []] if name == "auto" else [[], []])


@pytest.mark.parametrize("name", ["auto", "rejection", "block", "traversal", "typical"])
def test_dead_nodes_are_no_draft(name: str) -> None:
    check_that_others_do_not_matter(name, [[], []], num_dead=2)


def test_dead_nodes_that_count_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Draft, "num_live_per_request", property(lambda draft: draft.num_nodes_per_request))
    is_plain = Verification._is_plain

    def by_nodes(self: Verification, draft: Draft) -> torch.Tensor:
        return is_plain(self, attrs.evolve(draft, parents=torch.full_like(draft.parents, -1), is_chain=False))

    monkeypatch.setattr(Verification, "_is_plain", by_nodes)
    with pytest.raises(AssertionError):
        check_that_others_do_not_matter("traversal", [[], []], num_dead=2)


def check_that_others_do_not_matter(name: str, chosen: list[list[int]], num_dead: int = 0) -> None:
    """Assert that two requests get the same tokens with and without a third request in the batch, which has a sampled
    draft.

    name: the verifier's name.
    chosen: the deterministic draft tokens of the two requests.
    num_dead: number of dead (padding) nodes of the first request, after its draft tokens.
    """
    num_nodes = sum(map(len, chosen)) + num_dead
    draft = Draft.from_chains([[*chosen[0], *[3] * num_dead], *chosen[1:], [2]])
    parents = draft.parents.clone()
    parents[len(chosen[0]) : len(chosen[0]) + num_dead] = DEAD
    draft = attrs.evolve(
        draft,
        parents=parents,
        q=torch.full((1, 4), 0.25),
        q_rows=torch.tensor([-1] * len(chosen[0]) + [0] * num_dead + [-1] * len(chosen[1]) + [0], dtype=torch.int32),
    )
    rule = verification(verifier=name)
    decides = rule.choose(draft, [SAMPLED] * 3)
    num_accepted = 0
    for seed in range(40):
        logits = torch.randn(num_nodes + 4, 4, generator=torch.Generator().manual_seed(seed))
        noise = CounterRandom([seed, seed + 1, seed + 2], torch.tensor([5, 6, 7]))
        together = rule.verify(decides, logits, draft, noise)
        live = [i for i in range(num_nodes + 2) if not len(chosen[0]) < i <= len(chosen[0]) + num_dead]
        alone = rule.verify("chosen", logits[live], Draft.from_chains(chosen), noise)
        width = alone.token_ids.shape[1]
        assert torch.equal(together.token_ids[:2, :width], alone.token_ids)
        assert bool((together.token_ids[:2, width:] == -1).all())
        assert torch.equal(together.rows[:2, :width], torch.tensor(live, dtype=torch.int32)[alone.rows.long()])
        assert torch.equal(together.num_accepted[:2], alone.num_accepted)
        num_accepted += int(alone.num_accepted[0])
    assert (num_accepted > 0) == any(chosen)


class Lenient:
    """A lossy verifier that accepts every draft token and emits token 0 after them."""

    def verify(self, logits: torch.Tensor, draft: Draft, random: Any) -> Verdict:
        assert draft.is_chain
        first = torch.tensor([[0, 1, 2]]) + 3 * torch.arange(draft.batch_size)[:, None]
        tokens = torch.cat([draft.token_ids.view(-1, 2), torch.zeros(draft.batch_size, 1, dtype=torch.int64)], dim=1)
        return Verdict(tokens, first.int(), torch.full((draft.batch_size,), 2, dtype=torch.int32))


def test_a_lossy_verifier_does_not_decide_on_greedy_requests() -> None:
    """A lossy verifier does not verify greedy requests, even in a batch with requests that sample."""
    plugins = Plugins.load()
    plugins.verifier = lambda name: VerifierSpec(name, Lenient, 1, lossless=False)  # type: ignore[method-assign]
    rule = Verification(plugins, SpeculativeConfig(method="mine", num_speculative_tokens=2, verifier="lenient"))
    params = [SAMPLED, GREEDY, SAMPLED, GREEDY]
    draft = Draft.from_chains([[1, 2]] * 4)
    best = torch.tensor([0, 0, 0, 1, 3, 0, 0, 0, 0, 3, 0, 0])  # the first greedy request takes 1, the second nothing
    logits = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    logits[torch.arange(12), best] = 9.0
    logits = process_logits(logits, draft.host_layout.row_requests, params)
    name = rule.choose(draft, params)
    verdict = rule.verify(name, logits, draft, CounterRandom([1, 2, 3, 4], torch.tensor([5, 6, 7, 8])), [1, 3])
    assert name == "lenient"
    assert verdict.token_ids.tolist() == [[1, 2, 0], [1, 3, -1], [1, 2, 0], [3, -1, -1]]
    assert verdict.num_accepted.tolist() == [2, 1, 2, 0]
    assert [rule.is_lossless(each) for each in params] == [False, True, False, True]
    assert rule.is_lossless(attrs.evolve(SAMPLED, num_speculative_tokens=0))
    assert rule.is_lossless(attrs.evolve(SAMPLED, speculative_methods=()))
    assert verification(verifier="block").is_lossless(SAMPLED)
    assert verification().is_lossless(SAMPLED)


def test_what_a_named_verifier_cannot_do_is_refused() -> None:
    with pytest.raises(PluginError, match="'block' takes chains only, and the draft is a tree"):
        verification(verifier="block").choose(TREE, [SAMPLED])
    greedy = verification(verifier="greedy")
    greedy.check(GREEDY)
    with pytest.raises(ConfigError, match=r"temperature=0.7 does not go with the verifier 'greedy'"):
        greedy.check(SAMPLED)
    with pytest.raises(PluginError, match="unknown verifier 'blocks'"):
        verification(verifier="blocks")


def fails() -> Any:
    raise OSError("no such file")


class Careless:
    def verify(self, *args: Any) -> Any:
        raise KeyError("lost")


@pytest.mark.parametrize(
    ("build", "says"), [(Careless, "failed in a step: KeyError"), (fails, "could not be built: OSError")]
)
def test_a_verifier_that_raises_is_named(build: Any, says: str) -> None:
    plugins = Plugins.load()
    plugins.verifier = lambda name: VerifierSpec(name, build, 1)  # type: ignore[method-assign]
    config = SpeculativeConfig(method="mine", num_speculative_tokens=2, verifier="mine")
    with pytest.raises(PluginError, match=f"verifier 'mine' {says}"):
        Verification(plugins, config).verify("mine", torch.zeros(3, 4), CHAIN, FirstToken())


def test_options_of_a_verifier() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, 0.0], [0, 0, 0, 0], [0, 0, 0, 0]])
    for alpha, num_accepted in ((0.2, 1), (1.0, 0)):
        rule = verification(verifier="typical", posterior_alpha=alpha, posterior_threshold=1.0)
        verdict = rule.verify("typical", logits, TREE, FirstToken())
        assert verdict.num_accepted.tolist() == [num_accepted]
        assert not rule.is_lossless(SAMPLED)
    with pytest.raises(ConfigError, match="posterior_alpha=2 is out of range"):
        verification(verifier="typical", posterior_alpha=2)
    with pytest.raises(ConfigError, match="no key 'posterior_alpha'"):
        verification(verifier="rejection", posterior_alpha=0.5)


class FirstToken:
    def target_token(self, weights: torch.Tensor, requests: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(requests)


def test_typical_acceptance_against_its_definition() -> None:
    """The verifier `typical` accepts the longest path of typical tokens, or the first of several such paths.

    A token is typical if its probability is above min(threshold, alpha * exp(-entropy)).
    """
    generator = torch.Generator().manual_seed(0)
    rule = verification(verifier="typical")
    found = []
    for _ in range(200):
        parents = [int(torch.randint(-2, node, (), generator=generator)) for node in range(7)]
        tree = DraftTree(torch.randint(5, (7,), generator=generator).tolist(), parents)
        logits = 2 * torch.randn(8, 5, generator=generator)
        verdict = rule.verify("typical", logits, Draft.from_trees([tree]), FirstToken())
        best: list[int] = []
        for node in range(7):
            path: list[int] = []
            while node >= 0:
                path.insert(0, node)
                node = parents[node]
            rows = [0, *(i + 1 for i in path[:-1])]
            if node == -1 and all(is_typical(logits[r], tree.token_ids[i]) for r, i in zip(rows, path, strict=True)):
                best = max(best, path, key=len)
        tokens = [tree.token_ids[i] for i in best] + [0]
        assert verdict.token_ids[0, : len(tokens)].tolist() == tokens
        assert int(verdict.num_accepted[0]) == len(best)
        found.append(len(best))
    assert {0, 1, 2} <= set(found)


def is_typical(logits: torch.Tensor, token: int) -> bool:
    probs = logits.double().softmax(-1)
    entropy = -sum(p * p.log() for p in probs)
    return bool(probs[token] > min(0.09, 0.3 * (-entropy).exp()))


def test_a_verdict_may_be_on_several_devices() -> None:
    """And it reaches the host in one copy if it is all on one."""
    given = Verdict(torch.tensor([[5, -1]]), torch.tensor([[0, 0]]).int(), torch.tensor([0]).int())
    with PretendCuda() as pretend:
        there = [each.to(CUDA) for each in (given.token_ids, given.rows, given.num_accepted)]
        before = len(pretend.waits)
        one = _on_host(Verdict(*there))
        assert len(pretend.waits) == before + 1
        mixed = _on_host(Verdict(there[0], given.rows, there[2]))
    for found in (one, mixed):
        for name in ("token_ids", "rows", "num_accepted"):
            value = getattr(found, name)
            assert value.device.type == "cpu"
            assert torch.equal(value, getattr(given, name))
            assert value.dtype == getattr(given, name).dtype
