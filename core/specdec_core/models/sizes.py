"""Finds sizes in a config.json that no model can have, which make transformers and torch fail in many ways."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from specdec_core.config.fields import shown

MOST_LAYERS = 4096  # several times the deepest model; making a million, even without memory, takes minutes
SIZE = re.compile(r"num_\w*heads|num_hidden_layers|\w*(head_dim|hidden_size|intermediate_size|vocab_size)")


def wrong_sizes(config: Mapping[str, Any]) -> str:
    """Return what is wrong with them, such as "head_dim=0 must be a whole number from 1"; "" if all sizes are possible.

    config: the content of a config.json. Objects in it, such as text_config, are searched, too.
    """
    wrong = [
        f"{key}={shown(value)}"
        for part in (config, *(nested for nested in config.values() if isinstance(nested, Mapping)))
        for key, value in part.items()
        if SIZE.fullmatch(str(key)) and value is not None and (type(value) is not int or value < 1)
    ]
    if not wrong:
        return ""
    return f"{' and '.join(wrong)} must be {'whole numbers' if wrong[1:] else 'a whole number'} from 1"


def unusable_sizes(text_config: Any) -> str:
    """Return which size of a configuration that transformers has loaded cannot be run, and what is allowed; "" if none.

    text_config: the configuration of the text decoder.
    """

    def value_of(key: str) -> int | None:
        found = None
        with suppress(Exception):  # transformers refuses to name one value where layers differ (Gemma 4)
            found = getattr(text_config, key, None)
        return found if type(found) is int else None  # some families have lists, or other names

    num_layers, longest = value_of("num_hidden_layers"), value_of("max_position_embeddings")
    heads, key_heads = value_of("num_attention_heads"), value_of("num_key_value_heads")
    if num_layers is not None and not 1 <= num_layers <= MOST_LAYERS:
        return f"num_hidden_layers={shown(num_layers)} must be a whole number from 1 to {MOST_LAYERS}"
    if longest is not None and longest < 2:
        return f"max_position_embeddings={shown(longest)} must be a whole number from 2"
    if heads and key_heads and (key_heads < 0 or heads % key_heads):
        return f"num_key_value_heads={shown(key_heads)} must divide num_attention_heads={shown(heads)}"
    return ""
