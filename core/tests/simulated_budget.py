"""A budget, requests, and a simulated engine whose steps take given times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import torch

from specdec_core.budget.budget import Budget
from specdec_core.budget.choice import Expected
from specdec_core.budget.cost_curve import CostCurve
from specdec_core.budget.plain_steps import PlainSteps
from specdec_core.contracts.draft import Draft

CPU = torch.device("cpu")


def request_of(name: str = "any", num_tokens: int = 5) -> Any:
    return SimpleNamespace(id=name, token_ids=np.zeros(num_tokens, dtype=np.int64))


def budget_at(node: float, *names: str, in_place: bool = False, most: int = 9) -> Budget:
    """A budget of these requests, for which another token in the forward pass costs `node` times the first one."""
    curve = CostCurve({1: 1.0, 2: 1.0 + node}, 64)
    budget = Budget(curve, len(names), most, in_place=in_place)
    for name in names:
        budget.start(request_of(name), is_sampled=False)
    return budget


class Simulated:
    """A simulated engine with one request, whose proposer drafts chains.

    node, draft: the cost of another token in the forward pass, and of drafting. A forward pass costs 1.
    score: of all draft tokens; None: they have none.
    is_measured: whether forward passes are measured, too, with plain steps in between.

    Attributes: found, the share of steps in which there is any draft token. load, by which all times are multiplied.
    """

    def __init__(
        self,
        node: float = 0.02,
        draft: float = 0.1,
        most: int = 6,
        seed: int = 0,
        score: float | None = None,
        *,
        is_measured: bool = False,
    ) -> None:
        self.budget, self.request, self.most = budget_at(node, "any", most=most), request_of(), most
        self.random, self.plain = np.random.default_rng(seed), PlainSteps(self.budget._curve)
        self.node, self.draft_s, self.score, self.is_measured = node, draft, score, is_measured
        self.seconds, self.found, self.load = 0.0, 1.0, 1.0

    def step(self, right: float) -> tuple[int, int]:
        """Simulate one step. Returns the numbers of drafted and accepted tokens. right: the probability that a draft
        token is accepted."""
        if self.is_measured and self.plain.takes(1, self.budget.saved_share):
            self.budget.pass_step()
            limit = 0
        else:
            (limit,) = self.budget.share([self.request], [self.most], Expected.of_plain(1))
        num_accepted, drafted_s = 0, 0.0
        if limit:
            self.budget.levels([limit], CPU)
            if self.random.random() >= self.found:
                limit = 0
            scores = None if self.score is None else torch.full((limit,), self.score)
            (limit,) = self.budget.keep(
                attrs.evolve(Draft.from_chains([[7] * limit]), scores=scores)
            ).num_nodes_per_request
            drafted_s = self.draft_s * self.load
            self.budget.end_drafting(drafted_s, 0.0)
            while num_accepted < limit and self.random.random() < right:
                num_accepted += 1
        last = 7 if num_accepted == limit and self.random.random() < right else 2
        self.request.token_ids = np.append(self.request.token_ids, [7] * num_accepted + [last])
        pass_s = (1 + self.node * limit) * self.load
        if self.is_measured:
            self.budget._curve.add(1, 1 + limit, pass_s)
        step_s = pass_s + drafted_s
        self.seconds += step_s
        self.plain.end_steps(step_s)
        self.budget.end_steps([step_s], 1, {"any": num_accepted})
        return limit, num_accepted

    def steps(self, number: int, right: float) -> np.ndarray:
        return np.array([self.step(right) for _ in range(number)])
