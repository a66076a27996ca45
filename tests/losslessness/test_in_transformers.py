"""specdec-transformers: in each family of models, `generate` returns with drafts what it returns without."""

from __future__ import annotations

import random

import pytest
import reference
import torch
from families import FAMILIES, save_family

from specdec_core import ConfigError
from specdec_transformers import speculative

NUM_TOKENS = 32
WAYS = [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 40, "repetition_penalty": 1.1}]


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
    model = reference.load(save_family(family, tmp_path, eos_token_id=None))
    prompt = torch.tensor(reference.prompts(120, [9], seed=2))
    faster, draw = speculative({"method": "prediction", "num_speculative_tokens": 5}), random.Random(0)
    if model._is_stateful:
        with pytest.raises(ConfigError, match="recurrent layers"):
            model.generate(prompt, max_new_tokens=4, custom_generate=faster)
        return
    for how in WAYS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            plain = model.generate(prompt, max_new_tokens=NUM_TOKENS, **how)
            output = plain[0, prompt.shape[1] :].tolist()
            wrong = [draw.randrange(120) if draw.random() < 0.25 else token for token in output]
            torch.manual_seed(0)
            drafted = model.generate(prompt, max_new_tokens=NUM_TOKENS, custom_generate=faster, prediction=wrong, **how)
        assert drafted.tolist() == plain.tolist()
        assert 5 < faster.counts.num_accepted < faster.counts.num_draft_tokens
