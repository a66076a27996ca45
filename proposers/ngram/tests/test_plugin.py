import subprocess
import sys

import torch

from specdec_core import DraftTree, TargetInfo
from specdec_proposer_ngram import NgramConfig, specdec_proposers
from specdec_testing import propose


def test_the_entry_module_is_light():
    code = (
        "import sys, specdec_proposer_ngram as p; p.specdec_proposers(); p.NgramConfig(); "
        "print(sorted({'torch', 'numba', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_it_needs_nothing_of_the_target():
    (spec,) = specdec_proposers()
    target = TargetInfo("any", "any", 100, 8, 2, 64, torch.float32, torch.device("cpu"))
    plan = spec.plan(NgramConfig(), target, 5)
    assert (plan.taps, plan.kv_layout, plan.scratch_slots, plan.weight_bytes, plan.observes) == ((), None, 0, 0, False)


def test_found_by_name():
    assert propose("ngram", [[7, 8, 9, 1, 7, 8], [1]], num_speculative_tokens=3, prompt_lookup_max=2) == [
        DraftTree([9, 1, 7], [-1, 0, 1]),
        DraftTree([], []),
    ]
