"""TokenDrafter: a proposer outside of the engine gets the same text and gives the same drafts as in it."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings, strategies as st

from specdec_core import (
    DEAD,
    ConfigError,
    Draft,
    DraftTree,
    Plan,
    PluginError,
    Plugins,
    Proposer,
    ProposerSpec,
    TargetInfo,
    TokenDrafter,
    TokenRequest,
)
from specdec_core.drafting.paths import likeliest_paths

TARGET = TargetInfo("none", "llama", 50, 8, 2, 512, torch.float32, torch.device("cpu"))
CONFIG = {"method": "watcher", "num_speculative_tokens": 4}


@frozen
class WatcherConfig:
    watcher_model: str = "none"


class Watcher(Proposer):
    """Records what it observes, and drafts copies of one token."""

    def __init__(self):
        self.seen, self.draft_token, self.calls = {}, 1, []

    def start(self, request):
        self.seen[request.id] = []

    def observe(self, observation):
        for i, request in enumerate(observation.requests):
            assert observation.starts[i] == len(self.seen[request.id])
            rows = slice(observation.offsets[i], observation.offsets[i + 1])
            self.seen[request.id] += observation.token_ids[rows].tolist()
            assert observation.positions[rows].tolist()[-1] == len(self.seen[request.id]) - 1
            assert int(observation.next_token_ids[i]) == request.token_ids[-1]
            assert observation.host_last_rows[i] == rows.stop - 1

    def propose(self, batch):
        for i, request in enumerate(batch.requests):
            assert [*self.seen[request.id], int(batch.root_token_ids[i])] == request.token_ids.tolist()
        return Draft.from_chains([[self.draft_token] * most for most in batch.max_draft_tokens])

    def finish(self, request, reason):
        self.calls.append((request.id, reason))
        del self.seen[request.id]

    def close(self):
        self.calls.append("close")


class Only(Plugins):
    """Has one proposer, `watcher`."""

    def __init__(self, plan):
        super().__init__(())
        self.watcher = Watcher()
        self.spec = ProposerSpec(
            "watcher", WatcherConfig, lambda *_: self.watcher, api=1, plan=lambda config, target, number: plan
        )

    def proposer(self, name):
        return self.spec if name == "watcher" else super().proposer(name)


def drafter_of(plan=None, **config):
    plugins = Only(plan or Plan())
    drafter = TokenDrafter({**CONFIG, **config}, TARGET, max_num_seqs=4, plugins=plugins)
    return drafter, plugins.watcher


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 49), max_size=9), max_size=6), st.lists(st.integers(0, 49), min_size=1))
def test_an_observing_proposer_sees_each_token_once(outputs, prompt):
    drafter, watcher = drafter_of()
    requests = [TokenRequest("a", prompt), TokenRequest("b", [7])]
    for request in requests:
        drafter.start(request)
    text = list(prompt)
    for output in outputs:
        assert drafter.propose_chains(requests, [9, 2]) == [[1] * 4, [1] * 2]
        requests[0].append(output)
        text += output
        assert requests[0].token_ids.tolist() == text
    for request in requests:
        drafter.finish(request, "length")
    drafter.close()
    assert watcher.calls == [("a", "length"), ("b", "length"), "close"]


def test_limits():
    request = TokenRequest("a", [1, 2, 3])
    drafter, _ = drafter_of(Plan(max_model_len=5))
    drafter.start(request)
    assert drafter.propose_chains([request], [4]) == [[1, 1]]
    request.append([4, 5, 6])
    assert drafter.propose_chains([request], [4]) == [[]]
    needs_prediction, _ = drafter_of(Plan(reads_prediction=True))
    both = [TokenRequest("a", [1]), TokenRequest("b", [1], prediction=[5])]
    for request in both:
        needs_prediction.start(request)
    assert needs_prediction.propose_chains(both, [2, 2]) == [[], [1, 1]]
    alone, _ = drafter_of(disable_by_batch_size=1)
    for request, drafts in zip(both, ([[1]], [[]]), strict=True):
        alone.start(request)
        assert alone.propose_chains([request], [1]) == drafts


def test_a_wrong_draft_is_the_plugins_error():
    drafter, watcher = drafter_of()
    watcher.draft_token = TARGET.vocab_size
    request = TokenRequest("a", [1])
    drafter.start(request)
    with pytest.raises(PluginError, match=r"'watcher'.*token_ids.*49"):
        drafter.propose([request], [3])


@pytest.mark.parametrize(
    ("plan", "config", "says"),
    [
        (Plan(taps=("input.2",)), {}, r"'watcher' needs features of the target \(input.2\).*token ids alone: "),
        (Plan(top_tokens=2), {}, "needs the target's likeliest tokens"),
        (Plan(), {"adaptive_draft_length": True}, "adaptive_draft_length=True cannot be used outside of LLM"),
        (Plan(), {"verifier": "typical"}, "verifier='typical' cannot be used outside of LLM"),
        (Plan(), {"watcher_modle": 1}, "did you mean 'watcher_model'"),
        (Plan(), {"method": ["watcher", "watcher"]}, "2 methods are combined by LLM only"),
    ],
)
def test_refused(plan, config, says):
    with pytest.raises(ConfigError, match=says):
        drafter_of(plan, **config)


def test_a_name_alone_is_not_enough_without_a_default():
    with pytest.raises(ConfigError, match="'watcher' has no num_speculative_tokens"):
        TokenDrafter("watcher", TARGET, max_num_seqs=4, plugins=Only(Plan()))


def test_tokens_are_read_only():
    request = TokenRequest("a", [1, 2])
    with pytest.raises(ValueError, match="read-only"):
        request.token_ids[0] = 5
    before = request.token_ids
    request.append(range(100))
    assert before.tolist() == [1, 2]
    assert request.token_ids.dtype == np.int64
    assert request.num_prompt_tokens == 2


@st.composite
def scored_drafts(draw):
    trees = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(0, 7))
        tokens = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
        trees.append(DraftTree(tokens, [draw(st.sampled_from([-1, *range(i), DEAD])) for i in range(size)]))
    draft = Draft.from_trees(trees)
    scores = draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=draft.num_nodes, max_size=draft.num_nodes))
    return evolve(draft, scores=torch.tensor(scores)) if draw(st.booleans()) else draft


@settings(deadline=None)
@given(scored_drafts())
def test_no_path_is_expected_to_give_more(draft):
    for request, path in enumerate(likeliest_paths(draft)):
        token_ids, parents = draft.tree(request)
        scores = [1.0] * len(token_ids) if draft.scores is None else draft.scores[draft.offsets[request] :].tolist()
        yields = {(): 0.0}
        for node in range(len(token_ids)):
            above = [node]
            while above[-1] >= 0:
                above.append(parents[above[-1]])
            if above.pop() == DEAD:
                continue
            above.reverse()
            tokens = tuple(token_ids[each] for each in above)
            expected = sum(accumulate((scores[each] for each in above), lambda a, b: a * b))
            yields[tokens] = max(expected, yields.get(tokens, 0.0))
        assert yields[tuple(path)] == max(yields.values())
