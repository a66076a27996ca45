"""Computes from scratch what the proposer in probe_draft.py must draft, without KV cache, blocks or batches.

transformers runs the target over a request's whole text, and dense attention runs the draft layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import reference
import torch
from probe_layers import KEY_DIM, NUM_HEADS, NUM_KV_HEADS, ROTARY_BASE, VALUE_DIM, ProbeModel
from probe_recorder import Drafted
from probe_trees import shape_of
from recorded_runs import Expected

from specdec_core.contracts.verifier import Stream
from specdec_core.sampling.random import CounterRandom

LOGIT_MARGIN = 1e-3
PROBABILITY_MARGIN = 1e-5


class DenseDraft:
    def __init__(self, model_dir: Path, layer: str, style: str, *, sums: bool = True) -> None:
        self.target = reference.load(model_dir)
        self.model = ProbeModel(layer, self.target.config.hidden_size, "eager").double()
        self.layer, self.style, self.has_sums = layer, style, sums
        self.features: dict[str, torch.Tensor] = {}  # float64 [num_tokens, 3 * hidden] of each request's whole text

    @torch.inference_mode()
    def read(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Run the target over all tokens of a request, and keep the hidden states.

        Attention is causal, so each row depends only on its own token and earlier ones.
        """
        states = self.target(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False).hidden_states
        self.features[request_id] = torch.cat([states[i][0] for i in (1, 2, -1)], dim=-1).double()

    @torch.inference_mode()
    def __call__(self, drafted: Drafted, text: list[int]) -> Expected:
        if drafted.request_id not in self.features:
            self.read(drafted.request_id, text)
        history, temperature = drafted.history, drafted.temperature
        num_slots = len(history) - 1
        fused = unit(self.features[drafted.request_id][:num_slots] @ self.model.fuse.weight.T)
        shape = shape_of(drafted.seed, num_slots)[: drafted.max_draft_tokens]
        random = CounterRandom([drafted.seed], torch.tensor([num_slots]))
        tokens: list[int] = []
        all_probs: list[torch.Tensor | None] = []
        outputs: dict[int, torch.Tensor] = {}  # of the nodes, and of the root as -1
        is_clear = True
        for node, parent in enumerate(shape):
            if parent not in outputs:
                outputs[parent] = self._output(parent, list(history[1:]), fused, tokens, shape, outputs)
            logits = self._head(outputs[parent])
            rank = shape[:node].count(parent)
            if self.style == "chosen" or temperature == 0:
                ordered = logits.sort(descending=True)
                is_clear &= bool((-ordered.values.diff()[max(rank - 1, 0) : rank + 1]).min() > LOGIT_MARGIN)
                tokens.append(int(ordered.indices[rank]))
                all_probs.append(None)
            else:
                probs = (logits / temperature).softmax(dim=-1)
                token, is_safe = drawn(random, probs, node)
                is_clear &= is_safe
                tokens.append(token)
                all_probs.append(probs)
        return Expected(tokens, shape, all_probs, is_clear)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.target.get_output_embeddings().weight.double() @ unit(hidden)

    def _output(
        self,
        node: int,
        tokens: list[int],
        fused: torch.Tensor,
        drafted: list[int],
        shape: list[int],
        outputs: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        """Compute the draft layer's output [hidden] at a node (draft token), or at the root (-1).

        The layer's input holds only the observed tokens and the path to the node, so no sibling is attended to.

        tokens: ids of the observed tokens.
        fused: the layer's input features for the observed tokens, made from the target's hidden states.
        drafted: token ids of the nodes.
        shape: parents of the nodes.
        outputs: the layer's outputs computed so far, by node.
        """
        path = []
        while node >= 0:
            path.insert(0, node)
            node = shape[node]
        features = [fused, *(outputs[shape[node]].unsqueeze(0) for node in path)]
        embedded = self.target.get_input_embeddings()(torch.tensor(tokens + [drafted[node] for node in path])).double()
        both = torch.cat([unit(embedded), unit(torch.cat(features))], dim=-1)
        hidden = both @ self.model.enter.weight.T
        last = (self._own_layer(hidden) if self.layer == "own" else self._llama_layer(hidden))[-1]
        return last if path or not self.has_sums else last + fused.mean(dim=0)

    def _llama_layer(self, hidden: torch.Tensor) -> torch.Tensor:
        length = len(hidden)
        mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        cos, sin = self.model.layer.rotary(hidden[None], torch.arange(length)[None])
        return self.model.layer.layer(hidden[None], position_embeddings=(cos, sin), attention_mask=mask)[0]

    def _own_layer(self, hidden: torch.Tensor) -> torch.Tensor:
        weights: Any = self.model.layer
        length, entering = len(hidden), unit(hidden)
        query = turned((entering @ weights.query.weight.T).view(length, NUM_HEADS, KEY_DIM))
        key = turned((entering @ weights.key.weight.T).view(length, NUM_KV_HEADS, KEY_DIM))
        value = (entering @ weights.value.weight.T).view(length, NUM_KV_HEADS, VALUE_DIM)
        answers = []
        for head in range(NUM_HEADS):
            shared = head * NUM_KV_HEADS // NUM_HEADS
            scores = query[:, head] @ key[:, shared].T / KEY_DIM**0.5
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
            answers.append(scores.softmax(dim=-1) @ value[:, shared])
        hidden = hidden + torch.cat(answers, dim=-1) @ weights.output.weight.T
        inner = unit(hidden) @ weights.up.weight.T
        return hidden + (inner * inner.sigmoid()) @ weights.down.weight.T


def unit(hidden: torch.Tensor) -> torch.Tensor:
    return hidden / (hidden.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()


def turned(heads: torch.Tensor) -> torch.Tensor:
    """Apply rotary embedding to queries or keys [length, n, width]. A row's index is its position."""
    angles = torch.arange(len(heads))[:, None, None] / ROTARY_BASE ** (torch.arange(0, KEY_DIM, 2) / KEY_DIM)
    even, odd = heads[..., 0::2], heads[..., 1::2]
    result = torch.empty_like(heads)
    result[..., 0::2] = even * angles.cos() - odd * angles.sin()
    result[..., 1::2] = even * angles.sin() + odd * angles.cos()
    return result


def drawn(random: CounterRandom, probs: torch.Tensor, node: int) -> tuple[int, bool]:
    """Sample a node's token from probs [vocab] with the engine's random numbers.

    Returns the token, and whether the token would be the same if probabilities changed by PROBABILITY_MARGIN.
    """
    request, nodes = torch.zeros(1, dtype=torch.int64), torch.tensor([node])
    token = int(random.categorical(probs.unsqueeze(0), Stream.DRAFT, request, nodes))
    end = float(probs[: token + 1].sum())

    def is_below(bound: float) -> bool:
        return bool(random.bernoulli(torch.tensor([bound]).double(), Stream.DRAFT, request, nodes))

    start = end - float(probs[token])
    return token, is_below(end - PROBABILITY_MARGIN) and (start <= 0 or not is_below(start + PROBABILITY_MARGIN))
