"""Makes a random checkpoint with a tokenizer and installs a test proposer, so core's tests need no other package of
specdec."""

from __future__ import annotations

import string
from pathlib import Path

import torch

BIGRAM = """
from itertools import islice, pairwise

from attrs import frozen

from specdec_core import Draft, Proposer, ProposerSpec, hookimpl


@frozen
class Config:
    most: int = 100


class Bigram(Proposer):
    '''Every token is followed by what followed it last.'''

    def __init__(self, most):
        self.most = most

    def propose(self, batch):
        chains = [list(islice(self.chain(r.token_ids.tolist()), min(n, self.most)))
                  for r, n in zip(batch.requests, batch.max_draft_tokens)]
        return Draft.from_chains(chains)

    def chain(self, tokens):
        followers, token = dict(pairwise(tokens)), tokens[-1]
        while token in followers:
            token = followers[token]
            yield token


@hookimpl
def specdec_proposers():
    return [ProposerSpec("bigram", Config, build=lambda config, context: Bigram(config.most), api=1)]
"""


def install_bigram(folder: Path) -> Path:
    """Install a distribution with the proposer `bigram` into `folder`. Returns `folder`, which the caller adds to
    sys.path."""
    info = folder / "dist_bigram-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "dist_bigram_module.py").write_text(BIGRAM)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dist-bigram\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[specdec]\nbigram = dist_bigram_module\n")
    return folder


def save_checkpoint(folder: Path, *, seed: int = 0, is_broken: bool = False) -> Path:
    """Save a Llama with two layers of random weights and a byte-level BPE tokenizer. Returns the folder.

    is_broken: the embeddings of token ids from 16 on are NaN, and so are the logits after such a token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    printable = string.ascii_letters + string.digits + string.punctuation + " \n"  # no control characters: they confuse
    tokenizer.train_from_iterator([printable, BIGRAM], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    # The last token decides most, and few tokens are likely to follow: the text repeats itself before long.
    model.model.embed_tokens.weight.data *= 20
    model.lm_head.weight.data[:32] *= 20
    if is_broken:
        model.model.embed_tokens.weight.data[16:] = torch.nan  # the first few tokens are what a model is tried out with
    model.save_pretrained(folder)
    return folder
