import sys
from pathlib import Path

import pytest

from specdec_testing import tiny_target

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside this file, however pytest imports it


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=8)
