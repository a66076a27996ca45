"""Computes from scratch what the methods `mlp_speculator` and `medusa` must draft.

transformers runs the target over a request's whole text. Reference implementations of the heads, written from the
authors' code, compute logits from the hidden state of the token before the request's last one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import medusa_reference
import mlp_reference
import reference
import torch
from probe_recorder import Drafted
from recorded_runs import Expected
from safetensors.torch import load_file
from static_drafts import NUDGE, Path as Path_, static_draft

from specdec_core import TokenTree

ROUNDING = 1e-5
"""Relative noise on the hidden state that may not change the paths that a tree is made of, if it is to be compared."""


class Head:
    """A head's checkpoint. `logits` computes its logits after some draft tokens, float64 [draft_vocab]; ids: int64
    [draft_vocab], the target's id of each of its tokens."""

    ids: torch.Tensor

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")

    def logits(self, hidden: torch.Tensor, root: int, path: Path_) -> torch.Tensor:
        raise NotImplementedError


class SpeculatorHead(Head):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ids = torch.arange(self.config["vocab_size"])

    def logits(self, hidden: torch.Tensor, root: int, path: Path_) -> torch.Tensor:
        return mlp_reference.chain_logits(self.tensors, self.config, hidden, [root, *path])[-1]


class MedusaHead(Head):
    """lm_head: the target's, for heads without output layers of their own."""

    def __init__(self, folder: Path, lm_head: torch.Tensor) -> None:
        super().__init__(folder)
        self.lm_head = lm_head
        self.ids = self.tensors.get("token_map", torch.arange(len(lm_head)))

    def logits(self, hidden: torch.Tensor, root: int, path: Path_) -> torch.Tensor:
        if "blocks.0.layers.0.weight" in self.tensors:
            rows = medusa_reference.vllm_logits(self.tensors, self.config, hidden)
        else:
            rows = medusa_reference.head_logits(self.tensors, hidden, self.config["medusa_num_layers"], self.lm_head)
        return rows[len(path), self.ids]


class LastHiddenFromScratch:
    """A callable that takes a recorded draft and returns the draft that the proposer should have made.

    shape: the shape of the trees; None: the paths that an MLP speculator's n_candidates and top_k_tokens_per_head give.
    is_sampled: whether draft tokens are sampled at temperatures above 0. Sampled tokens are copied from the recorded
        draft, and only their probabilities are computed.
    """

    def __init__(
        self, target: Path, make: Callable[[torch.Tensor], Head], shape: TokenTree | None, *, is_sampled: bool
    ) -> None:
        self.target, self.shape, self.is_sampled = reference.load(target).double(), shape, is_sampled
        self.head = make(self.target.get_output_embeddings().weight.detach())
        self.hidden: dict[tuple[int, ...], torch.Tensor] = {}  # float64 of each whole text
        self.random = torch.Generator().manual_seed(0)

    @torch.inference_mode()
    def __call__(self, drafted: Drafted, text: list[int]) -> Expected:
        if (key := tuple(text)) not in self.hidden:
            self.hidden[key] = reference.final_hidden_states(self.target, text)
        hidden, root = self.hidden[key][len(drafted.history) - 2], drafted.history[-1]
        noise = torch.randn(hidden.shape, generator=self.random, dtype=hidden.dtype)
        if self.shape is None:
            return self._paths(drafted, [hidden * (1 + amount * noise) for amount in (0, ROUNDING, -ROUNDING)])

        known: dict[tuple[Path_, bool], torch.Tensor] = {}

        def after(path: Path_, *, is_nudged: bool = False) -> torch.Tensor:
            if (path, is_nudged) not in known:
                nudged = hidden * (1 + NUDGE * noise) if is_nudged else hidden
                known[path, is_nudged] = self.head.logits(nudged, root, path)
            return known[path, is_nudged]

        return static_draft(drafted, self.shape, after, self.head.ids, is_sampled=self.is_sampled)

    def _paths(self, drafted: Drafted, nudged: list[torch.Tensor]) -> Expected:
        """Build the tree of the most probable paths. nudged: the hidden state, and the same with noise."""
        trees = []
        for hidden in nudged:
            paths, _ = mlp_reference.candidates(self.head.tensors, self.head.config, hidden, drafted.history[-1])
            nodes = mlp_reference.prefix_tree(drafted.history[-1], paths)[1 : 1 + drafted.max_draft_tokens]
            trees.append([(token, parent - 1) for token, parent, _ in nodes])
        tokens, parents = zip(*trees[0], strict=True)
        is_clear = trees.count(trees[0]) == len(trees)
        return Expected(list(tokens), list(parents), [None] * len(tokens), is_clear)
