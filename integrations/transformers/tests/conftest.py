import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests

from transformers_models import model_of


@pytest.fixture(scope="session")
def llama():
    return model_of("llama")


@pytest.fixture
def prompt():
    return torch.tensor([[5, 9, 31, 7, 44, 9, 31, 7, 20]])
