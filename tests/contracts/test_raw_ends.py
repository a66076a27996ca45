"""Unscaled input embeddings and uncapped logits for proposers: without the embedding scale and the logit softcap of
families such as Gemma 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from offered import Offered
from transformers import Gemma2Config, Gemma2ForCausalLM

from specdec_core import LLM, BuildContext, Draft, Observation, Plan, Proposer, ProposerBatch, ProposerSpec
from specdec_core.models import Model

HIDDEN, VOCAB, CAP = 32, 64, 3.0
Patch = pytest.MonkeyPatch


@frozen
class NoOptions:
    pass


class Bare(Proposer):
    """A proposer that drafts one token: the argmax of the LM head without softcap.

    The LM head is applied to the sum of the last observed hidden state and the unscaled input embedding of the last
    token.
    """

    seen: list[tuple[torch.Tensor, ...]]

    def __init__(self, config: NoOptions, context: BuildContext) -> None:
        self.context, self.last = context, {}
        Bare.seen = []

    def observe(self, observation: Observation) -> None:
        for i, request in enumerate(observation.requests):
            self.last[request.id] = observation.features["final"][observation.last_rows[i]].clone()

    def propose(self, batch: ProposerBatch) -> Draft:
        embed, head, ids = self.context.embed, self.context.output_head, batch.root_token_ids
        hidden = torch.stack([self.last[request.id] for request in batch.requests]) + embed(ids, raw=True)
        Bare.seen.append((ids, embed(ids), embed(ids, raw=True), hidden, head(hidden), head(hidden, raw=True)))
        return Draft.from_chains([[token] for token in head(hidden, raw=True).argmax(-1).tolist()], self.context.device)


BARE = ProposerSpec(
    name="bare", config=NoOptions, build=Bare, api=1, plan=lambda config, target, n: Plan(taps=("final",))
)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """The folder of a Gemma 2 target with a logit softcap, and the target's embedding matrix [VOCAB, HIDDEN]."""
    folder = tmp_path_factory.mktemp("gemma")
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        final_logit_softcapping=CAP,
        initializer_range=0.3,
        eos_token_id=None,
    )
    model = Gemma2ForCausalLM(config)
    model.save_pretrained(folder)
    return folder, model.get_input_embeddings().weight.detach().clone()


def scale_stays(patch: Patch) -> None:
    embed = Model.embed
    patch.setattr(Model, "embed", lambda self, token_ids, raw=False: embed(self, token_ids))


def cap_stays(patch: Patch) -> None:
    output_head = Model.output_head
    patch.setattr(Model, "output_head", lambda self, hidden, raw=False: output_head(self, hidden))


@pytest.mark.parametrize("fault", [None, scale_stays, cap_stays])
def test_raw_leaves_out_scale_and_cap(
    fault: Callable[[Patch], None] | None, gemma: tuple[Path, torch.Tensor], monkeypatch: Patch
) -> None:
    if fault is not None:
        fault(monkeypatch)
    folder, table = gemma
    settings: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 32, "skip_tokenizer_init": True}
    config = {"method": "bare", "num_speculative_tokens": 1}
    llm = LLM(folder, plugins=Offered(BARE), speculative_config=config, **settings)
    llm.generate([{"prompt_token_ids": [5, 9, 11]}], use_tqdm=False)
    assert len(Bare.seen) > 3
    are_right = []  # the embedding of token 0, Gemma's padding, is 0 with the scale, too
    for ids, scaled, bare, hidden, capped, logits in Bare.seen:
        are_right.append(torch.allclose(bare, table[ids]) and torch.allclose(logits, hidden @ table.T, atol=1e-4))
        torch.testing.assert_close(scaled, table[ids] * HIDDEN**0.5, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(capped, CAP * torch.tanh(hidden @ table.T / CAP), rtol=1e-4, atol=1e-4)
    assert all(are_right) == (fault is None)
