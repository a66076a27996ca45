"""The packaged model loads like any other, matches its card, and completes Python."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec_model_tiny import model_path

HEADERS = (
    "def add(a, b):\n",
    "def get_name(self):\n",
    "def __len__(self):\n",
    "def is_empty(self):\n",
    'def read_file(path):\n    """Return the content of a file."""\n',
    "def __init__(self, name, value=None):\n",
    "def __repr__(self):\n",
    "def close(self):\n",
)
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(model_path())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loads_in(dtype):
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=dtype)
    assert model.dtype == dtype
    assert torch.isfinite(model(torch.tensor([[0, 5, 9]])).logits).all()


def test_stored_as_bfloat16_within_24_megabytes():
    assert AutoModelForCausalLM.from_pretrained(model_path(), dtype="auto").dtype == torch.bfloat16
    assert sum(file.stat().st_size for file in model_path().glob("model*.safetensors")) <= 24e6


def test_architecture(model):
    config = model.config
    assert config.model_type == "llama"
    assert config.num_hidden_layers >= 8
    assert config.hidden_size & (config.hidden_size - 1) == 0
    assert config.max_position_embeddings >= 2048
    assert config.vocab_size == 8192
    assert config.tie_word_embeddings
    assert 8e6 <= model.num_parameters() <= 11e6


def test_end_of_text(model, tokenizer):
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert len(tokenizer) == model.config.vocab_size


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200))
def test_tokenizer_gives_back_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@torch.inference_mode()
def test_logits_stay_finite_up_to_the_end_of_the_context(model):
    generator = torch.Generator().manual_seed(0)
    logits = model(torch.randint(2, 8192, (1, 2048), generator=generator)).logits
    assert torch.isfinite(logits[0, 2040:]).all()


def parseable_prefix(text: str) -> ast.Module | None:
    """Parse a completion, leaving out as few of its last lines as possible. They may be incomplete because of the token
    limit. None if nothing parses."""
    lines = text.split("\n")
    for end in range(len(lines), 1, -1):
        try:
            return ast.parse("\n".join(lines[:end]))
        except SyntaxError:
            continue
    return None


def test_completions_of_function_headers_parse(model, tokenizer):
    parsed = 0
    for header in HEADERS:
        inputs = tokenizer(header, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        tree = parseable_prefix(tokenizer.decode(output[0], skip_special_tokens=True))
        parsed += tree is not None and isinstance(tree.body[0], ast.FunctionDef)
    assert parsed >= len(HEADERS) // 2, f"only {parsed} of {len(HEADERS)} completions are Python"


def test_importing_the_package_is_light():
    code = "import sys, specdec_model_tiny; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
