"""The options of an engine, except those of speculation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set as AbstractSet
from pathlib import Path
from typing import Any

from attrs import Factory, field, fields_dict, frozen

from specdec_core.config.fields import (
    checkpoint,
    flag,
    must,
    num_ranks,
    number,
    one_of,
    option,
    options,
    text,
    unknown_key,
    whole_number,
)
from specdec_core.config.hashing import config_hash
from specdec_core.config.idle import idle_option

DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def _dtype_name(value: Any) -> Any:
    """Convert a torch dtype, or one of vLLM's short names ("half", "float"), to the name that this project uses, such
    as "float16". Other values are returned unchanged."""
    if not isinstance(value, str) and type(value).__module__ != "torch":
        return value
    try:
        name = str(value).removeprefix("torch.")
    except Exception:  # a class of the caller's own, which the validator refuses
        return value
    return DTYPE_ALIASES.get(name, name)


@frozen(kw_only=True)
class EngineConfig:
    """The options of an engine, except those of speculation. `LLM` takes each as a keyword argument."""

    model: str | Path = field(
        validator=checkpoint,
        metadata={"help": "The target: a folder, a name on the model hub, or the name of an embedded model."},
    )
    runner: str = idle_option(one_of("auto", "generate"), "this engine only generates text", default="auto")
    tokenizer_mode: str = option(
        one_of("auto", "slow"),
        "'slow' loads the slow tokenizer where transformers still has one.",
        default="auto",
        hashed=False,
    )
    trust_remote_code: bool = option(flag, "Run the Python code that comes with a checkpoint.", default=False)
    revision: str | None = option(
        text(optional=True), "Branch, tag or commit of the model's repository on the hub. None: its main branch."
    )
    code_revision: str | None = option(
        text(optional=True),
        "Branch, tag or commit of the code that trust_remote_code allows, where that has a repository of its own. "
        "None: its main branch.",
    )
    tokenizer_revision: str | None = option(
        text(optional=True),
        "Branch, tag or commit of the tokenizer's repository. None: as revision, if the tokenizer is the model's own.",
        hashed=False,
    )
    dtype: str = field(
        default="auto",
        converter=_dtype_name,
        validator=one_of("auto", "float32", "float16", "bfloat16"),
        metadata={
            "help": "Type of weights and activations. 'auto': bfloat16 where the device computes in it, else float32. "
            "'half' and 'float' are names of float16 and float32, and torch's own types are taken too."
        },
    )
    device: str | None = option(
        text(optional=True), "Where to run, such as 'cpu', 'cuda' or 'cuda:1'. None: on a GPU if there is one."
    )
    quantization: Any = option(
        None,
        "How to quantize the weights: 'int8' or 'int4' (on a CPU, too), the name of a method of transformers, or its "
        "quantization config as a mapping or an object. None: the weights stay as the checkpoint has them, quantized "
        "or not. A draft has an option of its own.",
        allowed="a name, a mapping or an object, or None",
    )
    tensor_parallel_size: int = option(
        num_ranks,
        "Number of processes that share each layer of the target: on GPUs in a row from device on, or on the CPU.",
        default=1,
    )
    seed: int | None = option(
        whole_number(-(2**63), 2**64, optional=True),
        "Requests that have no seed of their own draw theirs from this one, so that two runs of a script give the same "
        "outputs, unless measured times decide how much is drafted (adaptive_draft_length). None: from a random one.",
        default=0,
        hashed=False,
    )
    enforce_eager: bool = option(
        flag,
        "On a GPU, launch each kernel of target and draft by itself, instead of a CUDA graph of all of them. That "
        "takes less memory and more time. On a CPU it changes nothing.",
        default=False,
    )
    max_model_len: int | None = option(
        whole_number(2, optional=True),
        "Most tokens of a request, prompt and output together. None: as many as the model was trained for.",
    )
    max_num_seqs: int = option(whole_number(1), "Most requests that run at once. Others wait.", default=256)
    max_num_batched_tokens: int = option(
        whole_number(1),
        "Most tokens of a forward pass, draft tokens included. Longer prompts are cut into chunks.",
        default=2048,
    )
    block_size: int = option(whole_number(1), "Tokens in a block of the KV cache.", default=16)
    kv_manager: str = option(
        text(), "What keeps keys and values: a KV manager that `spec-decode plugins` lists.", default="paged"
    )
    kv_manager_config: Mapping[str, Any] = option(
        options, "The options of kv_manager, by their names.", default=Factory(dict)
    )
    num_kv_blocks: int | None = option(
        whole_number(1, optional=True),
        "Blocks of the KV cache. None: as many as max_num_seqs requests of max_model_len tokens need, or as many as "
        "fit into memory if that is less.",
        hashed=False,
    )
    gpu_memory_utilization: float | None = option(
        number(0, 1, low_open=True, optional=True),
        "On a GPU, the share of its memory that the engine may fill (None: 0.9); on a CPU, the share that the KV cache "
        "may take of what the weights leave free (None: 0.25). num_kv_blocks overrides it.",
        hashed=False,
    )
    disable_log_stats: bool = option(
        flag,
        "Log nothing about speed and acceptance. Otherwise the logger specdec_core.engine.metrics has a line for every "
        "ten seconds of work and one with the totals when the engine is closed, at level INFO.",
        default=False,
        hashed=False,
    )
    metrics_prefix: str = option(
        must(
            lambda value: isinstance(value, str) and re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", value),
            "does not begin a metric's name: give letters, digits and _, such as 'vllm'",
            "letters, digits and _",
        ),
        "The names of metrics begin with it. 'vllm' gives scripts and dashboards for vLLM the names they know.",
        default="vllm",
        hashed=False,
    )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], other_keys: AbstractSet[str] = frozenset()) -> EngineConfig:
        """Make a config from keywords. Raises ConfigError for an unknown key, and suggests the nearest known one.

        other_keys: keys that this class does not accept, but that the error may suggest, since the caller accepts them.
        """
        own = fields_dict(cls)
        for key in mapping:
            if key not in own:
                raise unknown_key(key, own.keys() | other_keys, "LLM")
        return cls(**mapping)

    compute_hash = config_hash
