"""A test proposer that drafts as EAGLE does, with random weights. It uses every feature that the proposer contract has
for draft models and draft heads.

Entry i of its KV cache is computed from the input embedding of token i + 1 and the target's hidden states of token i,
at rotary position i. Its drafts depend only on a request's tokens, seed and temperature, so tests can compute them from
scratch.
"""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen
from probe_layers import KEY_DIM, LLAMA_DIM, LLAMA_KV_HEADS, NUM_KV_HEADS, VALUE_DIM, ProbeModel, norm
from probe_trees import MOST_NODES, Level, levels_of, shape_of

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.kv import KVLayout, KVMetadata, Visibility
from specdec_core.contracts.proposer import (
    BuildContext,
    Observation,
    Plan,
    Proposer,
    ProposerBatch,
    ProposerSpec,
    RequestView,
)
from specdec_core.contracts.target import TargetInfo
from specdec_core.contracts.verifier import Stream

TAPS = ("input.1", "input.2", "final")


@frozen
class ProbeConfig:
    layer: str = "own"  # or "llama"
    style: str = "chosen"  # or "sampled", where the temperature is not 0
    sums: bool = True  # whether drafts depend on all features that were observed: not what a cached prefix is for


class Probe(Proposer):
    def __init__(self, config: ProbeConfig, context: BuildContext) -> None:
        assert context.attention is not None
        self.style, self.has_sums = config.style, config.sums
        self.context, self.attention, self.device = context, context.attention, context.device
        hidden_size = context.target.hidden_size
        self.model = ProbeModel(config.layer, hidden_size, self.attention.implementation)
        self.model.to(context.device, context.target.dtype)
        if config.layer == "llama":
            self.attention.bind([self.model.layer.layer.self_attn])
        context.speed_up(self.model)
        self.rows: dict[str, int] = {}  # of the tensors below, by request
        self.free = list(range(context.max_num_seqs))
        self.last = torch.zeros(context.max_num_seqs, hidden_size, device=context.device)  # what comes out at n - 1
        self.sums = torch.zeros_like(self.last)  # of all fused features
        self.num_seen = torch.zeros(context.max_num_seqs, 1, device=context.device)

    def start(self, request: RequestView) -> None:
        self.rows[request.id] = self.free.pop()
        self.reset(request)

    def reset(self, request: RequestView) -> None:
        row = self.rows[request.id]
        self.last[row], self.sums[row], self.num_seen[row] = 0, 0, 0

    def finish(self, request: RequestView, reason: str) -> None:
        self.reset(request)
        self.free.append(self.rows.pop(request.id))

    def observe(self, observation: Observation) -> None:
        """Write the KV-cache entries of the observed tokens. Entries past num_valid are invalid; they are overwritten
        before they are read."""
        assert len(observation.requests) <= self.context.max_num_seqs
        offsets = np.array(observation.offsets)
        counts = np.diff(offsets)
        owners = self._to_device(np.repeat(np.arange(len(counts)), counts))
        num_valid = observation.num_valid
        fused = norm(self.model.fuse(torch.cat([observation.features[tap] for tap in TAPS], dim=-1)))
        metadata = self.attention.metadata(observation.requests, observation.starts, counts.tolist())
        positions = observation.positions
        hidden = self._forward(
            observation.following_token_ids, fused, positions, Visibility(positions, positions + 1), metadata
        )
        is_valid = torch.arange(len(owners), device=self.device) < (self._to_device(offsets[:-1]) + num_valid)[owners]
        rows = self._rows_of(observation.requests)
        self.sums.index_add_(0, rows[owners], torch.where(is_valid.unsqueeze(1), fused, 0))
        self.num_seen.index_add_(0, rows, num_valid.unsqueeze(1).to(torch.float32))
        self.last[rows] = hidden[observation.last_rows]
        self.fill(observation)

    def fill(self, observation: Observation) -> None:
        ends = [start + n for start, n in zip(observation.starts, observation.host_num_valid, strict=True)]
        self.attention.fill(observation.requests, ends)

    def propose(self, batch: ProposerBatch) -> Draft:
        trees = [shape_of(request.seed, len(request.token_ids) - 1) for request in batch.requests]
        rows = self._rows_of(batch.requests)
        hidden = torch.zeros(len(trees), MOST_NODES + 1, self.last.shape[1], device=self.device)  # the root first
        hidden[:, 0] = self.last[rows] + (self.sums[rows] / self.num_seen[rows] if self.has_sums else 0)
        tokens = torch.zeros(len(trees), MOST_NODES, dtype=torch.int64, device=self.device)
        weights, sets = [], np.full((len(trees), MOST_NODES), -1)
        num_sets = 0
        levels = levels_of(trees)
        for level in levels:
            parents = hidden[level.requests[level.is_first_of_set], level.parents[level.is_first_of_set] + 1]
            logits = self.context.output_head(norm(parents))  # one row per set of siblings
            picked, draft_probs = self._pick(batch, level, logits)
            tokens[level.requests, level.nodes] = picked
            weights.append(draft_probs)
            sets[level.requests, level.nodes] = num_sets + level.sets
            num_sets += len(draft_probs)
            if level is not levels[-1]:
                feature = hidden[level.requests, level.parents + 1]
                hidden[level.requests, level.nodes + 1] = self._forward_nodes(batch, level, picked, feature)
        return self._draft(batch, trees, tokens, weights, sets)

    def _pick(self, batch: ProposerBatch, level: Level, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pick the draft tokens of one tree level.

        logits: [num_sets, vocab], one row for each set of siblings.
        Returns token ids int64 [n] and draft probabilities [num_sets, vocab].
        """
        requests, sets = self._to_device(level.requests), self._to_device(level.sets)
        ranked = logits.topk(int(level.ranks.max()) + 1, dim=-1).indices
        chosen = ranked[sets, self._to_device(level.ranks)]
        temperature = batch.temperature[requests[self._to_device(level.is_first_of_set)]].unsqueeze(1)
        draft_probs = (logits.float() / torch.where(temperature > 0, temperature, 1)).softmax(dim=-1)
        if self.style == "chosen":
            return chosen, draft_probs
        drawn = batch.random.categorical(draft_probs[sets], Stream.DRAFT, requests, self._to_device(level.nodes))
        return torch.where(batch.temperature[requests] > 0, drawn, chosen), draft_probs

    def _forward_nodes(
        self, batch: ProposerBatch, level: Level, tokens: torch.Tensor, feature: torch.Tensor
    ) -> torch.Tensor:
        """Run the draft tokens (nodes) of one tree level through the draft layer.

        A request's nodes are written, in order, to the KV-cache slots after the observed tokens. Each node attends
        to the observed tokens and to its ancestors.
        """
        roots = np.array([len(request.token_ids) - 1 for request in batch.requests])
        counts = np.bincount(level.requests, minlength=len(roots))
        starts = roots.copy()
        starts[level.requests[::-1]] += level.nodes[::-1]  # of several, the first node of each request is set last
        metadata = self.attention.metadata(batch.requests, starts.tolist(), counts.tolist())
        depth = level.ancestors.shape[1]
        positions = self._to_device(node_positions(roots[level.requests], depth))
        visibility = Visibility(
            positions,
            prefix_lens=self._to_device(roots[level.requests]),
            more_slots=self._to_device(roots[level.requests, None] + level.ancestors),
        )
        return self._forward(tokens, feature, positions, visibility, metadata)

    def _forward(
        self,
        tokens: torch.Tensor,
        feature: torch.Tensor,
        positions: torch.Tensor,
        visibility: Visibility,
        metadata: KVMetadata,
    ) -> torch.Tensor:
        with self.attention.forwarding(metadata, visibility):
            return self.model(self.context.embed(tokens), feature, positions, self.attention)

    def _draft(
        self,
        batch: ProposerBatch,
        trees: list[list[int]],
        tokens: torch.Tensor,
        weights: list[torch.Tensor],
        sets: np.ndarray,
    ) -> Draft:
        """Make the Draft. Each tree is cut to its first nodes, as many as max_draft_tokens allows."""
        counts = [min(len(tree), most) for tree, most in zip(trees, batch.max_draft_tokens, strict=True)]
        requests = np.repeat(np.arange(len(trees)), counts)
        nodes = np.concatenate([np.arange(n) for n in counts])
        parents = [parent for tree, n in zip(trees, counts, strict=True) for parent in tree[:n]]
        kept = [tree[:n] for tree, n in zip(trees, counts, strict=True)]
        q = q_rows = None
        if self.style == "sampled" and len(nodes):
            q = torch.cat(weights)
            is_greedy = batch.temperature[self._to_device(requests)] == 0
            q_rows = torch.where(is_greedy, -1, self._to_device(sets[requests, nodes])).to(torch.int32)
        return Draft(
            token_ids=tokens[requests, nodes],
            parents=torch.tensor(parents, dtype=torch.int32, device=self.device),
            offsets=tuple(np.cumsum([0, *counts]).tolist()),
            max_depth=len(levels_of(kept)),
            q=q,
            q_rows=q_rows,
        )

    def _rows_of(self, requests: object) -> torch.Tensor:
        return torch.tensor([self.rows[request.id] for request in requests], device=self.device)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def node_positions(root_positions: np.ndarray, depth: int) -> np.ndarray:
    """Return the rotary positions of nodes `depth` levels below the root. The draft layer's positions are one less than
    the target's."""
    return root_positions - 1 + depth


def plan(config: ProbeConfig, target: TargetInfo, num_speculative_tokens: int) -> Plan:
    with torch.device("meta"):
        empty = ProbeModel(config.layer, target.hidden_size, "eager")
    heads = (NUM_KV_HEADS, KEY_DIM, VALUE_DIM) if config.layer == "own" else (LLAMA_KV_HEADS, LLAMA_DIM, LLAMA_DIM)
    return Plan(
        taps=TAPS,
        kv_layout=KVLayout(1, *heads, dtype=target.dtype),
        scratch_slots=MOST_NODES,
        lookahead=1,
        weight_bytes=sum(weight.numel() * target.dtype.itemsize for weight in empty.parameters()),
    )


PROBE = ProposerSpec(name="probe", config=ProbeConfig, build=Probe, api=1, plan=plan)
