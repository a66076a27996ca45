"""draft_sample_method="auto", the default: draft tokens are drawn for requests that sample without a seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specdec_core import LLM, Draft, SamplingParams

PROMPTS = ["import os\n\nclass Tree:\n    def __init__(self", "x = [1, 2, 3]\n" * 4]
UNSEEDED, SEEDED = (
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=24, ignore_eos=True),
)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


class Watched:
    """An LLM, and the drafts of its last call."""

    def __init__(self, config: dict[str, Any] | None) -> None:
        config = config and {"adaptive_draft_length": False, **config}  # however little its drafts help
        self.llm = LLM("tiny", dtype="float32", speculative_config=config, disable_log_stats=True)
        self.drafts: list[Draft] = []
        run = self.llm.engine._runner.run
        self.llm.engine._runner.run = lambda schedule, draft: (self.drafts.append(draft), run(schedule, draft))[1]  # type: ignore[method-assign]

    def generate(self, *params: SamplingParams) -> list[list[int]]:
        self.drafts.clear()
        each = params * (len(PROMPTS) // len(params))
        outputs = self.llm.generate(PROMPTS, list(each), use_tqdm=False)
        self.drafts = [draft for draft in self.drafts if draft.num_nodes]
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def plain() -> Watched:
    return Watched(None)


@pytest.fixture(scope="module", params=["draft_model", "eagle", "eagle3"])
def drafting(request: pytest.FixtureRequest) -> Watched:
    return Watched({"method": request.param})


def test_chains_are_drawn_for_requests_without_a_seed(drafting: Watched) -> None:
    drafting.generate(UNSEEDED)
    assert len(drafting.drafts) > 3
    assert all(draft.q is not None and draft.is_chain for draft in drafting.drafts)


@pytest.mark.parametrize("params", [SEEDED, GREEDY], ids=["seeded", "greedy"])
def test_others_get_chosen_drafts_and_the_text_of_plain_decoding(
    drafting: Watched, plain: Watched, params: SamplingParams
) -> None:
    assert drafting.generate(params) == plain.generate(params)
    assert drafting.drafts
    assert all(draft.q is None for draft in drafting.drafts)


def test_in_a_batch_of_both_each_keeps_its_own(drafting: Watched, plain: Watched) -> None:
    _, found = drafting.generate(UNSEEDED, SEEDED)
    _, expected = plain.generate(UNSEEDED, SEEDED)
    assert found == expected
    both = [draft for draft in drafting.drafts if draft.batch_size == 2 and all(draft.num_nodes_per_request)]
    assert len(both) > 3
    for draft in both:
        first, second = _rows(draft)
        assert (first >= 0).all()
        assert (second < 0).all()


def _rows(draft: Draft) -> Iterator[Any]:
    assert draft.q_rows is not None
    for start, end in zip(draft.offsets, draft.offsets[1:], strict=False):
        yield draft.q_rows[start:end]


def test_a_tree_that_is_asked_for_stays_one() -> None:
    watched = Watched({"method": "eagle3", "eagle_topk": 3})
    watched.generate(UNSEEDED)
    assert all(draft.q is None for draft in watched.drafts)
    assert not all(draft.is_chain for draft in watched.drafts)
