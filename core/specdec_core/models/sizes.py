"""Finds sizes in a config.json that no model can have, which make transformers and torch fail in many ways."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specdec_core.config.fields import shown

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
