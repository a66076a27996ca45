"""The tiny model's architecture, with an attention function and a loss function that make training faster on a CPU,
where these two take most of the time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .tokenizer import VOCABULARY

QUERY_BLOCK = 128
LOSS_CHUNK = 1024
DTYPE = torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16") else torch.float32
"""Of the computation. Without instructions for bfloat16, a CPU multiplies such matrices a hundred times more slowly."""


def config() -> LlamaConfig:
    """Return the model's configuration: eight Llama layers of width 256, with 9.96M parameters including the tied
    embedding."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        dtype="bfloat16",
    )


def blocked_attention(
    _module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float,
    **_options: object,
) -> tuple[Tensor, None]:
    """Causal attention in blocks of queries; each block reads only the keys up to its end.

    query [batch, heads, length, head size], key and value [batch, KV heads, length, head size]; returns [batch, length,
    heads, head size]. In bfloat16, forward and backward are twice as fast as the CPU flash kernel for short sequences,
    since the matrix products run in the bfloat16 matrix kernels.
    """
    batch, heads, length, width = query.shape
    groups, share = key.shape[1], query.shape[1] // key.shape[1]
    block = min(max(QUERY_BLOCK, length // 8), length)
    grouped = (query * scaling).view(batch, groups, share, length, width)
    keys = key.reshape(batch * groups, length, width)
    values = value.reshape(batch * groups, length, width)
    outputs = []
    for start in range(0, length, block):
        end = min(start + block, length)
        size = end - start
        rows = grouped[:, :, :, start:end].reshape(batch * groups, share * size, width)
        scores = torch.bmm(rows, keys[:, :end].transpose(1, 2)).view(batch * groups, share, size, end)
        future = torch.arange(end)[None, :] > torch.arange(start, end)[:, None]
        weights = torch.softmax(scores.float().masked_fill(future, -1e9), -1).to(query.dtype)
        mixed = torch.bmm(weights.view(batch * groups, share * size, end), values[:, :end])
        outputs.append(mixed.view(batch, groups, share, size, width))
    return torch.cat(outputs, 3).view(batch, heads, length, width).transpose(1, 2), None


AttentionInterface.register("blocked", blocked_attention)


@torch.compile(dynamic=False)
def chunk_loss(hidden: Tensor, weight: Tensor, targets: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the weighted sum of the cross entropies of a chunk of tokens, and its gradients.

    hidden [N, width], weight [vocabulary, width] (the LM head), targets [N], shares [N]: each token's weight. Returns
    the loss, the gradient of ``hidden`` and that of the transposed weight.
    """
    logits = torch.mm(hidden, weight.t()).float()
    normaliser = torch.logsumexp(logits, 1)
    loss = ((normaliser - logits.gather(1, targets[:, None])[:, 0]) * shares).sum()
    hit = torch.arange(weight.shape[0])[None, :] == targets[:, None]
    error = ((torch.exp(logits - normaliser[:, None]) - hit.float()) * shares[:, None]).to(hidden.dtype)
    return loss, torch.mm(error, weight), torch.mm(hidden.t(), error)


class TiedLoss(torch.autograd.Function):
    """Weighted cross entropy of an LM head that is tied to the embedding, computed in chunks of tokens.

    Because of the chunks, the logits of all tokens [tokens, vocabulary] are never in memory at the same time. The
    gradient of the embedding is summed in float32.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, embedding: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
        """Compute the weighted loss of hidden states [N, width] (DTYPE) for target token ids [N], with the embedding
        [vocabulary, width] (float32) as the LM head and the tokens' weights ``shares`` [N]."""
        count, weight = hidden.shape[0], embedding.to(hidden.dtype)
        by_hidden = torch.empty_like(hidden)
        by_weight = torch.zeros(weight.shape[1], weight.shape[0])
        total = torch.zeros(())
        for start in range(0, count, LOSS_CHUNK):
            part = slice(start, start + LOSS_CHUNK)
            loss, by_part, by_chunk = chunk_loss(hidden[part], weight, targets[part], shares[part])
            by_hidden[part] = by_part
            by_weight += by_chunk
            total += loss
        ctx.save_for_backward(by_hidden, by_weight)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients of hidden states and embedding, which ``forward`` has already computed."""
        by_hidden, by_weight = ctx.saved_tensors
        return by_hidden * gradient.to(by_hidden.dtype), by_weight.t() * gradient, None, None


class Trainee:
    """A Llama in training, with weights in DTYPE for computing and float32 master weights for the optimizers.

    The layers are compiled, and all of them share the compiled code.
    """

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        torch._dynamo.config.recompile_limit = 32
        model = LlamaForCausalLM(config()).float()
        self.masters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        self.embedding = self.masters["model.embed_tokens.weight"]
        self.model = model.to(DTYPE)
        # The cast rounds the rotary frequencies too; a loaded model has them in float32.
        self.model.model.rotary_emb = LlamaRotaryEmbedding(config())
        self.model.set_attn_implementation("blocked")
        for layer in self.model.model.layers:
            layer.compile(dynamic=False)
        self._working = dict(self.model.named_parameters())

    def sync(self) -> None:
        """Copy the master weights into the model."""
        with torch.no_grad():
            for name, master in self.masters.items():
                self._working[name].copy_(master)

    def loss(self, ids: Tensor, weights: Tensor | None = None) -> Tensor:
        """Compute the mean next-token loss in nats of sequences of token ids [B, T + 1], each token's loss times its
        weight, [B, T]. None: 1. The LM head skips most tokens of weight 0, which code before an edit has."""
        inputs = torch.nn.functional.embedding(ids[:, :-1], self.embedding).to(DTYPE)
        hidden = self.model.model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        targets = ids[:, 1:].flatten()
        shares = (torch.ones(targets.shape) if weights is None else weights.flatten()) / len(targets)
        size = math.ceil(int(shares.count_nonzero()) / LOSS_CHUNK) * LOSS_CHUNK  # whole chunks: one compiled size
        kept = shares.argsort(descending=True)[:size]
        loss: Tensor = TiedLoss.apply(hidden.flatten(0, 1)[kept], self.embedding, targets[kept], shares[kept])  # type: ignore[no-untyped-call]
        return loss

    def unlikelihood(self, ids: Tensor, unwanted: Tensor) -> Tensor:
        """Compute the unlikelihood of the tokens that are not wanted: -log(1 - probability of the token) (Welleck et
        al. 2020, equation 4), summed and divided by the number of all tokens, so that it matters less as they get rare.

        ids [B, T + 1]: sequences of token ids. unwanted: bool [B, T], of ids[:, 1:].
        """
        inputs = torch.nn.functional.embedding(ids[:, :-1], self.embedding).to(DTYPE)
        hidden = self.model.model(inputs_embeds=inputs, use_cache=False).last_hidden_state[unwanted]
        logits = torch.mm(hidden, self.embedding.to(DTYPE).t()).float()
        shares = logits.softmax(1).gather(1, ids[:, 1:][unwanted][:, None])
        return -torch.log1p(-shares.clamp(max=1 - 1e-5)).sum() / unwanted.numel()

    def collect_gradients(self) -> None:
        """Move the gradients of the weights to the master weights, as float32. The embedding's gradient is there
        already, since the loss uses the embedding's master weights."""
        for name, working in self._working.items():
            if working.grad is not None:
                self.masters[name].grad = working.grad.float()
                working.grad = None


def plain_model(masters: dict[str, Tensor]) -> LlamaForCausalLM:
    """Build a bf16 model from master weights, for export. Raises ValueError if they do not fit the architecture."""
    model = LlamaForCausalLM(config()).bfloat16()
    missing, unexpected = model.load_state_dict(masters, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(
            f"the checkpoint does not fit the architecture: missing {missing}, unexpected {unexpected}; "
            "it comes from another configuration, so train again in a new work folder"
        )
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=1)
    return model
