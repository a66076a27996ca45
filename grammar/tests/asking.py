"""Requests for structured output, and the methods that draft for them."""

from __future__ import annotations

from typing import Any

from specdec_core import SamplingParams, StructuredOutputs

SETTINGS = {"dtype": "float32", "disable_log_stats": True}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CALL = r"(def|class) [a-z_]{3,12}\(\)(: pass)?"
CHOICE = ["yes, it is", "no", "maybe"]
LIST = 'start: item ("," item)*\nitem: /[a-z]{2,5}/ "=" /[0-9]{1,3}/'
ITEMS = r"[a-z]{2,5}=[0-9]{1,3}(,[a-z]{2,5}=[0-9]{1,3})*"
WANTED = [
    StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
    StructuredOutputs(regex=CALL),
    None,
    StructuredOutputs(choice=CHOICE),
    StructuredOutputs(grammar=LIST),
]
PROMPTS = ["def mean(values):\n", "import os\n", "class A:\n", "x = ", "a = 1, b = 2, a = 1, b = 2, "]
TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "num_speculative_tokens": 4},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 4},
    "eagle3, tree": {"method": "eagle3", "num_speculative_tokens": 6, "speculative_token_tree": TREE},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4},
}


def params(temperature: float, **more: Any) -> list[SamplingParams]:
    """One for each of WANTED; those above temperature 0 with a seed."""
    return [
        SamplingParams(
            temperature=temperature,
            seed=7 + i if temperature else None,
            structured_outputs=wanted,
            **{"max_tokens": 48, **more},
        )
        for i, wanted in enumerate(WANTED)
    ]
