"""Test cases for sampling parameters.

Each parameter's value is chosen from outputs generated without the parameter, so that the value changes the outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from attrs import field, frozen

from specdec_core.sampling.bad_words import tokenize_words

NAMES = (
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "logits_processors",
    "all together",
)


@frozen
class Case:
    """One test case: sampling parameters whose effect on the output is tested.

    asked: the parameters under test.
    without: the parameters of the run to compare with.
    """

    asked: dict[str, Any]
    without: dict[str, Any] = field(factory=dict)

    @property
    def changes_greedy(self) -> bool:
        return set(self.asked) != {"min_p"}


def lean_on_history(logits: torch.Tensor, token_ids: np.ndarray) -> torch.Tensor:
    """A logits processor whose result depends on the values and the order of the tokens so far."""
    places = (token_ids[-6:] * np.arange(3, 9)[-len(token_ids) :] + token_ids.sum()) % len(logits)
    logits[torch.from_numpy(places)] += 0.4 * logits.amax().abs()  # others may be -inf
    return logits


def cases(outputs: Sequence[Sequence[int]], tokenizer: Any) -> dict[str, Case]:
    """Return test cases by name: one for each sampling parameter, and one for all parameters together.

    outputs: token ids that the model generates without these parameters.
    """
    common = [token for token, _ in Counter(t for output in outputs for t in output).most_common(6)]
    stops = [output[3] for output in outputs]
    alone = {
        "min_p": Case({"min_p": 0.4}),
        "repetition_penalty": Case({"repetition_penalty": 1.4}),
        "presence_penalty": Case({"presence_penalty": 2.0}),
        "frequency_penalty": Case({"frequency_penalty": 1.5}),
        "logit_bias": Case({"logit_bias": {**dict.fromkeys(common[:3], -100.0), common[4]: 3.0}}),
        "bad_words": Case({"bad_words": words_in(outputs, tokenizer)}),
        "allowed_token_ids": Case({"allowed_token_ids": sorted(set(range(150)) - set(common))}),
        "min_tokens": Case({"stop_token_ids": stops, "min_tokens": 14}, without={"stop_token_ids": stops}),
        "logits_processors": Case({"logits_processors": [lean_on_history]}),
    }
    together = {key: value for case in alone.values() for key, value in case.asked.items()}
    together["logit_bias"] = dict.fromkeys(together["allowed_token_ids"][:3], 2.0)
    return {**alone, "all together": Case(together)}


def words_in(outputs: Sequence[Sequence[int]], tokenizer: Any) -> list[str]:
    """Return words from the outputs for the parameter `bad_words`. Some are one token long, some two."""
    singles = [(token,) for token, _ in Counter(t for output in outputs for t in output).most_common(20)]
    pairs = [pair for pair, _ in Counter(p for output in outputs for p in pairwise(output)).most_common(60)]
    found: list[str] = []
    for wanted, most in ((pairs, 6), (singles, 1)):
        words = [(tokenizer.decode(list(token_ids)).strip(), token_ids) for token_ids in wanted]
        fitting = [w for w, ids in words if w and list(ids) in tokenize_words([w], tokenizer)]
        assert fitting, "no word that the tokenizer would make as the model does"
        found += fitting[:most]
    return found
