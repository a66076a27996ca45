"""The published families of the plugin, by model_type, and what their config.json files have beyond the reference's."""

from __future__ import annotations

from typing import Any

from specdec_proposer_mtp.families import FAMILIES

PUBLISHED = {family.name: family for family in FAMILIES if family.name != "llama"}
MORE: dict[str, dict[str, Any]] = {  # keys of published config.json files that the reference does not read
    "deepseek_v3": {"num_key_value_heads": 4},
    "longcat_flash": {"num_key_value_heads": 4, "head_dim": 4},
}
