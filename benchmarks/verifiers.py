"""Measures how many draft tokens each verifier accepts, on random distributions.

    python benchmarks/verifiers.py            # writes benchmarks/results/verifiers.json

No model runs. At every node of a draft, the target's logits are drawn from a normal distribution, and the draft model's
logits are the target's plus normal noise: the more noise, the worse the draft. Draft tokens are sampled from the draft
model's logits. Every verifier gets the same drafts. Results are means over NUM_REQUESTS requests.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen

from specdec_core import Plugins
from specdec_core.contracts.draft import Draft, DraftTree
from specdec_core.sampling.random import CounterRandom

RESULTS = Path(__file__).parent / "results"
VOCAB = 64
SPREAD = 2.0  # standard deviation of the target's logits
NOISES = (0.5, 1.0, 2.0)
NUM_REQUESTS = 20_000
BATCH = 1_000
VERIFIERS = ("chosen", "rejection", "block", "traversal")


@frozen
class Shape:
    """The shape of a draft tree.

    widths: number of children of each node at depth 0, 1, and so on. The root, at depth 0, is the request's last token.
    with_replacement: whether siblings are sampled with replacement.
    """

    widths: tuple[int, ...]
    with_replacement: bool = True

    @property
    def is_chain(self) -> bool:
        return set(self.widths) == {1}

    @property
    def parents(self) -> list[int]:
        parents, level = [], [-1]
        for width in self.widths:
            nodes = range(len(parents), len(parents) + width * len(level))
            parents += [parent for parent in level for _ in range(width)]
            level = list(nodes)
        return parents


SHAPES = {
    "chain of 4": Shape((1,) * 4),
    "chain of 8": Shape((1,) * 8),
    "tree 3, 2, 1": Shape((3, 2, 1)),
    "tree 3, 2, 1 without replacement": Shape((3, 2, 1), with_replacement=False),
    "tree 4, 2, 2, 1 without replacement": Shape((4, 2, 2, 1), with_replacement=False),
}


def draw(shape: Shape, noise: float, generator: torch.Generator) -> tuple[torch.Tensor, Draft]:
    """Draw random target logits and drafts for BATCH requests.

    shape: shape of every request's draft tree.
    noise: standard deviation of the difference between the draft model's logits and the target's.
    Returns the target's logits, float32 [BATCH * (1 + draft tokens of a request), VOCAB], and the drafts. Each request
    has a row of logits for its last token and one for every draft token.
    """
    parents = shape.parents
    num_nodes = len(parents)
    logits = SPREAD * torch.randn(BATCH, num_nodes + 1, VOCAB, generator=generator)
    q = (logits + noise * torch.randn(logits.shape, generator=generator)).softmax(-1)
    tokens = torch.empty(BATCH, num_nodes, dtype=torch.int64)
    with_children = sorted(set(parents))
    for parent in with_children:
        nodes = [node for node, each in enumerate(parents) if each == parent]
        drawn = q[:, parent + 1].multinomial(len(nodes), replacement=shape.with_replacement, generator=generator)
        tokens[:, nodes] = drawn
    q_rows = torch.tensor([with_children.index(parent) for parent in parents])
    first_rows = len(with_children) * torch.arange(BATCH).unsqueeze(1)
    draft = Draft.from_trees([DraftTree([0] * num_nodes, parents)] * BATCH)
    draft = evolve(
        draft,
        token_ids=tokens.flatten(),
        q=q[:, [parent + 1 for parent in with_children]].flatten(0, 1),
        q_rows=(first_rows + q_rows).flatten().int(),
        with_replacement=shape.with_replacement,
        is_chain=shape.is_chain,
    )
    return logits.flatten(0, 1), draft


def measure(shape: Shape, noise: float) -> dict[str, float]:
    """Return {name of the verifier: mean number of accepted draft tokens per request}.

    shape: shape of the draft trees. If it is not a chain, verifiers that accept only chains are left out.
    noise: standard deviation of the difference between the draft model's logits and the target's.
    """
    plugins = Plugins.load()
    specs = {name: plugins.verifier(name) for name in VERIFIERS}
    rules = {name: spec.build() for name, spec in specs.items() if shape.is_chain or not spec.chains_only}
    generator, accepted = torch.Generator().manual_seed(0), dict.fromkeys(rules, 0)
    for batch in range(NUM_REQUESTS // BATCH):
        logits, draft = draw(shape, noise, generator)
        random = CounterRandom(range(batch * BATCH, (batch + 1) * BATCH), torch.full((BATCH,), 10))
        for name, rule in rules.items():
            accepted[name] += int(rule.verify(logits, draft, random).num_accepted.sum())
    return {name: total / NUM_REQUESTS for name, total in accepted.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "verifiers.json")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        results[name] = {str(noise): measure(shape, noise) for noise in NOISES}
        print(name, results[name], flush=True)
    setup = {"vocabulary": VOCAB, "spread": SPREAD, "requests": NUM_REQUESTS}
    args.output.write_text(json.dumps({"setup": setup, "accepted": results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
