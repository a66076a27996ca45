"""A model that writes given texts: after each token there is one that follows it with certainty, at temperature 0."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<end>"


def save_chains(folder: Path, chains: Sequence[Sequence[str]], special: Sequence[str] = ()) -> Path:
    """Save a checkpoint with its tokenizer. Returns the folder.

    chains: the tokens of each text. The first one is the prompt, which the tokenizer reads only as a whole.
    special: those of the tokens that are special.
    """
    tokens = [END, *(token for chain in chains for token in chain)]
    ids = {token: index for index, token in enumerate(tokens)}
    assert len(ids) == len(tokens), "each token is in one chain, once"
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=END))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*special])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    size = 64
    assert len(tokens) <= size
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=size, intermediate_size=size, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()  # so the layer adds nothing to a token's embedding
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokens), size))
        model.lm_head.weight.zero_()
        for chain in chains:
            for token, following in zip(chain, [*chain[1:], END], strict=True):
                model.lm_head.weight[ids[following], ids[token]] = 1
    model.save_pretrained(folder)
    return folder
