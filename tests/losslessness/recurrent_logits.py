"""Records the logits that an engine computes at each prompt and output token, for comparison with one forward pass of
transformers over the whole text."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from attrs import define, field, frozen

from specdec_core.engine.runner import Runner


@frozen(eq=False)
class Node:
    """A draft token, with its logits [vocab]."""

    token_id: int
    parent: int
    position: int
    logits: torch.Tensor


@define(eq=False)
class Recorded:
    """found: the logits [vocab] at each position of each request, those of the last time that it was computed. At an
    accepted draft token, they are those of its node; nodes that are accepted in a request's last step are left out."""

    found: dict[str, dict[int, torch.Tensor]] = field(factory=dict)
    num_later_chunks: int = 0  # of prompts, after the first
    num_accepted: int = 0  # draft tokens
    num_rejected: int = 0
    _nodes: dict[str, tuple[int, list[Node]]] = field(factory=dict)  # of each request's last step, with its root

    def largest_difference(self, model: Any, texts: dict[str, list[int]]) -> float:
        """The largest difference to transformers' logits, at any position of any request, relative to the largest
        logit of its text.

        texts: token ids by request, of prompt and output.
        """
        worst = 0.0
        for request_id, text in texts.items():
            expected, found = reference.logits(model, text), self.found[request_id]
            assert sorted(found) == list(range(len(found)))
            for position in range(min(len(found), len(text) - 1)):
                difference = float((found[position] - expected[position]).abs().max())
                worst = max(worst, difference / float(expected.abs().max()))
        return worst

    def add(self, schedule: Any, draft: Any, batch: Any, logits: torch.Tensor) -> None:
        """Add a forward pass. logits: float32 [num_tokens, vocab], of all tokens."""
        for i, request in enumerate(schedule.requests):
            start, num_known = batch.starts[i], schedule.num_known[i]
            known = self.found.setdefault(request.id, {})
            self.num_later_chunks += start > 0 and not request.is_decoding
            self._add_accepted(request, start)
            own = logits[batch.token_offsets[i] :]
            known.update((start + j, own[j].clone()) for j in range(num_known))
            tree, nodes, root = draft.tree(i), [], start + num_known - 1
            for j, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
                above = root if parent == -1 else nodes[parent].position if parent >= 0 else -2  # dead
                nodes.append(Node(token, parent, above + 1, own[num_known + j].clone()))
            self._nodes[request.id] = root, nodes

    def _add_accepted(self, request: Any, start: int) -> None:
        """Add the nodes that were accepted in the request's last step, if it had one since it was preempted."""
        root, nodes = self._nodes.pop(request.id, (start - 1, []))
        known, at = self.found[request.id], -1
        if start == 0:
            return
        for position in range(root + 1, start):
            wanted = int(request.token_ids[position]), at, position
            at = next(j for j, n in enumerate(nodes) if (n.token_id, n.parent, n.position) == wanted)
            known[position] = nodes[at].logits
        self.num_accepted += start - root - 1
        self.num_rejected += len(nodes) - (start - root - 1)


def record(patch: pytest.MonkeyPatch) -> Recorded:
    """Record all forward passes from now on."""
    recorded, run = Recorded(), Runner.run

    def recording(self: Runner, schedule: Any, draft: Any) -> Any:
        every: list[torch.Tensor] = []
        forward = self._target.forward

        def of_all_tokens(token_ids: Any, positions: Any, metadata: Any, seen: Any, rows: Any, **more: Any) -> Any:
            logits, features = forward(token_ids, positions, metadata, seen, torch.arange(len(token_ids)), **more)
            every.append(logits)
            return logits[rows], features

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self._target, "forward", of_all_tokens)
            computed = run(self, schedule, draft)
        recorded.add(schedule, draft, computed.batch, every[0])
        return computed

    patch.setattr(Runner, "run", recording)
    return recorded
