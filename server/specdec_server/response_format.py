"""OpenAI's field response_format, as structured_outputs of `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_core import ConfigError, StructuredOutputs, shown
from specdec_core.config.fields import refuse_unknown

FORMATS = "{'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', 'json_schema': {'schema': {...}}}"


def parse_response_format(value: Any) -> StructuredOutputs | None:
    """What an output has to match; None: anything. Raises ConfigError for other formats.

    A schema is always followed: its name, description and strict change nothing.
    """
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "json_schema":
        refuse_unknown(value, {"type", "json_schema"}, "response_format")
        return StructuredOutputs.parse({"json": _schema(value.get("json_schema"))})
    if value is not None and kind not in ("text", "json_object"):
        raise ConfigError(f"response_format={shown(value)} is not known: give {FORMATS}")
    refuse_unknown(value or (), {"type"}, "response_format")
    return StructuredOutputs(json_object=True) if kind == "json_object" else None


def _schema(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("schema"), Mapping):
        raise ConfigError(f"response_format has json_schema={shown(value)}, which has no schema: give {FORMATS}")
    refuse_unknown(value, {"name", "description", "schema", "strict"}, "response_format.json_schema")
    return value["schema"]  # type: ignore[no-any-return]
