"""What runs as CUDA graphs: a model's forward passes, and functions of draft heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from specdec_core.models.attention import PagedAttention
from specdec_core.models.graph_inputs import Call, Tensors
from specdec_core.models.graphs import Graphs, Pool
from specdec_core.ops.attention_plan import AttentionPlan

Result = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""Logits [num_rows, vocab] and hidden states {tap: [num_tokens, width]}."""


class ForwardGraphs:
    """Runs a model's forward passes as CUDA graphs.

    run: computes logits and features from token ids, positions, rows, and the plan and the window of attention.
    """

    def __init__(
        self, run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan, int | None], Result]
    ) -> None:
        self._run_model = run
        self._taps: tuple[str, ...] = ()
        self.graphs = Graphs(self._run, "a model")

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        rows: torch.Tensor,
        window: int | None,
    ) -> Result:
        """Run one forward pass. token_ids, positions: int64 [num_tokens]. rows: int64 [num_rows]."""
        logits, *features = self.graphs(Call((token_ids, positions, rows), plan, window, num_rows=len(rows)))
        return logits, dict(zip(self._taps, features, strict=True))

    def _run(self, call: Call) -> Tensors:
        assert call.plan is not None
        token_ids, positions, rows = call.tensors
        logits, features = self._run_model(token_ids, positions, rows, call.plan, call.window)
        self._taps = tuple(features)  # always the same
        return logits, *features.values()


class GraphedFunction:
    """Runs a function of tensors as CUDA graphs. What `BuildContext.graphed` returns on a GPU.

    function: as described there.
    attention: which the function may use inside of `forwarding`; None: it computes no attention.
    what, pool, max_model_len: as of `Graphs`.
    """

    def __init__(
        self,
        function: Callable[..., Tensors],
        attention: PagedAttention | None,
        what: str,
        pool: Pool | None = None,
        max_model_len: int = 0,
    ) -> None:
        self._function, self._attention = function, attention
        self.graphs = Graphs(self._run, what, pool, max_model_len)

    def __call__(self, *tensors: torch.Tensor, **fixed: Any) -> Tensors:
        attention = self._attention
        plan, window = (None, None) if attention is None else (attention.plan, attention.window)
        return self.graphs(Call(tensors, plan, window, tuple(sorted(fixed.items()))))

    def _run(self, call: Call) -> Tensors:
        given: Any = call.fixed
        fixed = dict(given)
        if self._attention is None or call.plan is None or call.plan is self._attention.plan:
            return _checked(self._function(*call.tensors, **fixed))
        with self._attention.replacing(call.plan):  # it has the window of the forward pass around it
            return _checked(self._function(*call.tensors, **fixed))


def _checked(results: Any) -> Tensors:
    if not isinstance(results, tuple):
        raise TypeError(f"a function that `graphed` got returned {type(results).__name__}: return a tuple of tensors")
    return results
