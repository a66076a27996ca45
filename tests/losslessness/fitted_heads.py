"""Tiny EAGLE draft heads that are trained briefly on their target, so that some of their draft tokens are accepted."""

from __future__ import annotations

from pathlib import Path

import reference
import torch
from reference_heads import target_token_ids
from safetensors.torch import save_file
from tiny_heads import TinyHead

from specdec_core import TargetInfo
from specdec_proposer_eagle.config import EagleConfig
from specdec_proposer_eagle.head_config import our_name
from specdec_proposer_eagle.loading import find, load

NUM_STEPS, NUM_TEXTS, LENGTH = 60, 24, 24


def fitted(written: TinyHead, target_dir: Path, folder: Path, taps: list[int]) -> TinyHead:
    """Train a draft head on token sequences that the target generated, and save it in `folder`.

    written: the untrained draft head.
    taps: indices of the target's hidden states in transformers that enter the draft head.
    """
    torch.manual_seed(0)
    target = reference.load(target_dir)
    config = target.config
    info = TargetInfo(
        str(target_dir),
        "llama",
        config.vocab_size,
        config.hidden_size,
        config.num_hidden_layers,
        64,
        torch.float32,
        torch.device("cpu"),
    )
    options = EagleConfig(model=written.folder)
    found = find(options, info, is_eagle3=taps != [-1])
    head, (module, _) = found.head, load(found, info)
    module.requires_grad_(True)
    start = torch.randint(config.vocab_size, (NUM_TEXTS, 2))
    with torch.no_grad():
        texts = target.generate(start, max_new_tokens=LENGTH, do_sample=True, pad_token_id=0)
        states = target(texts, output_hidden_states=True)
        features = torch.cat([states.hidden_states[i] for i in taps], dim=-1)
        embedded = target.get_input_embeddings()(texts)
    ids = target_token_ids(written.tensors, head.draft_vocab_size)
    output = module.lm_head or target.get_output_embeddings()
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    for step in range(NUM_STEPS):
        loss = torch.zeros(())
        for text in range(step % 3, NUM_TEXTS, 3):
            rotation = module.rotation(torch.arange(texts.shape[1] - 1), embedded.dtype)
            outputs, _ = module(embedded[text, 1:], module.fuse(features[text, :-1]), rotation, _dense)
            wanted = states.logits[text, 1:, ids].softmax(-1)
            loss = loss - (wanted * output(outputs).log_softmax(-1)).sum(-1).mean()
            if not head.is_eagle3:  # its outputs are to be the target's features
                loss = loss + 3 * torch.nn.functional.smooth_l1_loss(outputs, features[text, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ours = module.state_dict()
    tensors = {name: ours.get(our_name(name), tensor).detach().contiguous() for name, tensor in written.tensors.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((written.folder / "config.json").read_bytes())
    return TinyHead.read(folder)


def _dense(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, rows: None = None
) -> torch.Tensor:
    heads_first = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    return attended[0].transpose(0, 1)
