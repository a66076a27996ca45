"""The segments of an AttentionPlan. Every query token is in exactly one segment, together with its request's keys."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st

from specdec_core.contracts.kv import KVMetadata, Visibility
from specdec_core.ops.attention_plan import SHORT, AttentionPlan
from specdec_core.ops.padding import Padding

BLOCK_SIZE = 4
REQUESTS = st.lists(
    st.tuples(st.integers(0, 150), st.sampled_from([1, 1, 2, 7, SHORT, SHORT + 1, 90])), min_size=1, max_size=6
)


def plan_of(requests: list[tuple[int, int]], num_padding: int, padding: Padding) -> AttentionPlan:
    """Return a plan for requests without draft trees. The numbers in the block tables descend.

    requests: (number of cached tokens, number of query tokens) of each. num_padding: number of padding tokens at the
    end.
    """
    starts, lengths = zip(*requests, strict=True)
    num_blocks = max(-(-sum(request) // BLOCK_SIZE) for request in requests)
    tables = torch.arange(len(requests) * num_blocks).flip(0).view(len(requests), num_blocks)
    positions = torch.cat([*(torch.arange(s, s + n) for s, n in requests), torch.zeros(num_padding, dtype=torch.int64)])
    metadata = KVMetadata(starts, lengths, tables, torch.empty(0, dtype=torch.int64), BLOCK_SIZE)
    return AttentionPlan(metadata, Visibility(positions, positions + 1), padding)


@settings(deadline=None, max_examples=60)
@given(requests=REQUESTS, num_padding=st.integers(0, 5), padding=st.sampled_from([Padding(1, 8), Padding(4, 512)]))
def test_each_token_is_computed_once_and_sees_its_own_keys(requests: list, num_padding: int, padding: Padding) -> None:
    plan = plan_of(requests, num_padding, padding)
    computed = torch.cat([segment.valid_tokens for segment in plan.segments])
    assert sorted(computed.tolist()) == list(range(sum(plan.metadata.lengths)))
    owners = [request for request, (_, length) in enumerate(requests) for _ in range(length)]
    for segment in plan.segments:
        batch, num_rows = segment.token_rows.shape
        assert num_rows % padding.rows == 0
        assert segment.key_slots.shape[1] % padding.keys == 0
        for row, token in zip(segment.valid_rows.tolist(), segment.valid_tokens.tolist(), strict=True):
            b, r = divmod(row, num_rows)
            seen = segment.key_slots[b, segment.is_visible[b, r]]
            local = torch.arange(int(plan.visibility.positions[token]) + 1)
            blocks = plan.metadata.block_tables[owners[token], local // BLOCK_SIZE]
            assert torch.equal(seen, blocks * BLOCK_SIZE + local % BLOCK_SIZE)
        for b in range(batch):  # padded or not, a row of the rectangle reads no other request's slots
            owner = owners[int(segment.token_rows[b, 0])]
            assert torch.isin(segment.key_slots[b] // BLOCK_SIZE, plan.metadata.block_tables[owner]).all()


@settings(deadline=None, max_examples=60)
@given(requests=REQUESTS)
def test_long_requests_stand_alone(requests: list) -> None:
    plan = plan_of(requests, 0, Padding(4, 512))
    num_long = sum(length > SHORT for _, length in requests)
    long = plan.segments[len(plan.segments) - num_long :]
    assert all(segment.token_rows.shape[0] == 1 for segment in long)
    assert sum(segment.token_rows.shape[1] > SHORT for segment in plan.segments) == num_long


def test_segments_are_made_once() -> None:
    plan = plan_of([(30, 1), (20, 90)], 1, Padding(4, 512))
    assert plan.segments is plan.segments
