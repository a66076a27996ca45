"""The optimizer Muon (Jordan et al. 2024), in bfloat16 or float32."""

from __future__ import annotations

from typing import Any

import torch

COEFFICIENTS, NUM_ITERATIONS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
"""Of the Newton-Schulz iteration, as the authors chose them."""


class Muon(torch.optim.Optimizer):
    """Muon for weight matrices, with updates of the size of AdamW's (Liu et al. 2025, arXiv 2502.16982, section 2.2).

    It is torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"`, but for `dtype`. torch's always orthogonalizes in
    bfloat16, for which a CPU without such instructions takes a hundred times as long as for float32.

    dtype: in which updates are orthogonalized.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for matrix in (each for each in group["params"] if each.grad is not None):
                state, momentum = self.state[matrix], group["momentum"]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(matrix.grad)
                average = state["momentum_buffer"]
                average.lerp_(matrix.grad, 1 - momentum)
                update = orthogonalized(matrix.grad.lerp(average, momentum).to(self._dtype))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-0.2 * max(matrix.shape) ** 0.5 * group["lr"])


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix of the same singular vectors whose singular values are all near 1, between 0.7 and 1.2, by a few
    Newton-Schulz iterations. Values far below the largest one stay smaller."""
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=EPS)
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if wide.shape == matrix.shape else wide.T
