"""Computes from scratch what the method `mtp` must draft, without a KV cache.

transformers runs the target over a request's whole text. The reference implementation of MTP modules then drafts along
each path of the tree.
"""

from __future__ import annotations

import json
from pathlib import Path

import mtp_checkpoints
import mtp_reference
import reference
import torch
from attrs import evolve, frozen
from probe_recorder import Drafted
from recorded_runs import Expected
from safetensors.torch import load_file
from static_drafts import NUDGE, Path as Path_, static_draft

from specdec_core import TokenTree


@frozen(eq=False)
class Step:
    """What a module computes after a path: its features, [n, hidden], what recurs, and the last slot's logits."""

    features: torch.Tensor
    recurs: torch.Tensor  # [n, hidden]
    logits: torch.Tensor  # float64 [vocab]


class MTPFromScratch:
    """A callable that takes a recorded draft and returns the draft that the proposer should have made.

    With one module, a draft token adds a slot to it. With several, there is a module for each depth, over the slots of
    the same tokens: depth k reads the embeddings of the tokens k + 1 further on, and the hidden states of depth k - 1.

    folder: the checkpoint of the MTP modules, those of the family `llama`.
    shape: the shape of the trees.
    is_sampled: whether draft tokens are sampled at temperatures above 0. Sampled tokens are copied from the recorded
        draft, and only their probabilities are computed.
    window: how many positions each token attends to; None: all.
    """

    def __init__(
        self, target: Path, folder: Path, shape: TokenTree, *, is_sampled: bool, window: int | None = None
    ) -> None:
        self.target, self.shape, self.is_sampled = reference.load(target).double(), shape, is_sampled
        stated = json.loads((folder / "config.json").read_text())
        own = {"rope_theta": stated["rope_parameters"]["rope_theta"], "shared_tensors_in_module": False}
        self.config = {**stated, **mtp_checkpoints.RULES["llama"], **own, "draft_window": window}
        self.table = self.target.get_input_embeddings().weight.detach()
        self.num_modules = stated["num_nextn_predict_layers"]
        head = {"lm_head.weight": self.target.get_output_embeddings().weight.detach()}
        self.weights = {name: each.double() for name, each in load_file(folder / "model.safetensors").items()} | head
        self.features: dict[tuple[int, ...], torch.Tensor] = {}  # float64 of each whole text
        self.random = torch.Generator().manual_seed(0)

    @torch.inference_mode()
    def __call__(self, drafted: Drafted, text: list[int]) -> Expected:
        if (key := tuple(text)) not in self.features:
            self.features[key] = reference.final_hidden_states(self.target, text)
        features = self.features[key][: len(drafted.history) - 1]
        noise = torch.randn(features.shape, generator=self.random, dtype=features.dtype)
        known: dict[tuple[Path_, bool], Step] = {}

        def step(path: Path_, *, is_nudged: bool) -> Step:
            if (path, is_nudged) not in known:
                seen = features * (1 + NUDGE * noise) if is_nudged else features
                if path:
                    before = step(path[:-1], is_nudged=is_nudged)
                    several = self.num_modules > 1
                    seen = before.recurs if several else torch.cat([before.features, before.recurs[-1:]])
                known[path, is_nudged] = self._step([*drafted.history, *path], seen, len(path))
            return known[path, is_nudged]

        def after(path: Path_, *, is_nudged: bool = False) -> torch.Tensor:
            return step(path, is_nudged=is_nudged).logits

        ids = torch.arange(len(self.table))
        if self.num_modules > 1:
            within = sum(len(path) <= len(drafted.history) for path in self.shape.paths)
            drafted = evolve(drafted, max_draft_tokens=min(within, drafted.max_draft_tokens))
        return static_draft(drafted, self.shape, after, ids, is_sampled=self.is_sampled)

    def _step(self, token_ids: list[int], features: torch.Tensor, depth: int) -> Step:
        """Run the module of a depth over all slots. The last token is that of the last slot's embedding."""
        embedded = self.table[torch.tensor(token_ids[-len(features) :])]
        positions, module = torch.arange(len(features)), depth % self.num_modules
        hidden, logits = mtp_reference.forward(
            "llama", self.config, self.weights, embedded, features, positions, module
        )
        return Step(features, hidden, logits[-1])
