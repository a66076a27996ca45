"""What an engine is built from, checked by whoever owns each key."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set as AbstractSet
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from attrs import Attribute, field, fields, frozen

from specdec_core.errors import ConfigError
from specdec_core.hashing import UNHASHED, config_hash
from specdec_core.validators import checkpoint, flag, is_number, number, one_of, shown, text, whole_number

MOST_DRAFT_TOKENS = 2**16
MOST_COST = 100
AUTO = "auto"
"""The verifier that means: whichever fits."""

GREEDY, PROBABILISTIC = "greedy", "probabilistic"

DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def _dtype_name(value: Any) -> Any:
    """torch's own dtypes by their names, and vLLM's other names."""
    name = str(value)
    if not isinstance(value, str) and not name.startswith("torch."):
        return value
    name = name.removeprefix("torch.")
    return DTYPE_ALIASES.get(name, name)


def _one_process(instance: Any, attribute: Attribute[Any], value: Any) -> None:
    if not is_number(value) or value != 1:
        raise ConfigError(f"{attribute.name}={shown(value)} is not supported yet: leave it out, or give 1")


def _metrics_prefix(instance: Any, attribute: Attribute[Any], value: Any) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", value):
        raise ConfigError(
            f"{attribute.name}={shown(value)} does not begin a metric's name: give letters, digits and _, such as "
            f"'vllm'"
        )


@frozen(kw_only=True)
class DraftModelConfig:
    """The keys of methods that load a draft checkpoint: their config classes inherit from this one.

    model: a folder or a name on the model hub. max_model_len: no drafts for longer requests. quantization: as
    `EngineConfig`'s. draft_tensor_parallel_size: 1. enforce_eager and disable_padded_drafter_batch change nothing:
    there are no graphs yet, and drafts are not padded.
    """

    model: str | Path = field(validator=checkpoint())
    revision: str | None = field(default=None, validator=text(optional=True))
    code_revision: str | None = field(default=None, validator=text(optional=True))
    quantization: Any = None
    max_model_len: int | None = field(default=None, validator=whole_number(1, optional=True))
    draft_tensor_parallel_size: int = field(default=1, validator=_one_process, metadata=UNHASHED)
    enforce_eager: bool = field(default=False, validator=flag, metadata=UNHASHED)
    disable_padded_drafter_batch: bool = field(default=False, validator=flag, metadata=UNHASHED)

    def checked_max_model_len(self, target_len: int, draft_len: int | None = None) -> int:
        """How far the draft goes: as far as both models can, unless it is told. draft_len: None for a draft that goes
        as far as the target. Raises ConfigError if it is told to go further."""
        longest = {"the target": target_len}
        if draft_len is not None:
            longest = {"the draft model": draft_len, **longest}
        if self.max_model_len is None:
            return min(longest.values())
        for whose, most in longest.items():
            if self.max_model_len > most:
                raise ConfigError(
                    f"speculative_config has max_model_len={self.max_model_len}, but {whose} takes {most} tokens at "
                    f"most: lower it, or leave it out"
                )
        return self.max_model_len


@frozen(kw_only=True, slots=False)  # with slots, no class could inherit from it and another
class DraftSamplingConfig:
    """The key of methods that have distributions to draw from: their config classes inherit from this one."""

    draft_sample_method: str = field(default=GREEDY, validator=one_of(GREEDY, PROBABILISTIC))


def _both_costs(instance: Any, attribute: Attribute[Any], value: Any) -> None:
    level_cost = instance.draft_level_cost
    if (level_cost is None) != (value is None):
        raise ConfigError(
            f"draft_level_cost={level_cost} and draft_node_cost={value} go together: give both, or neither"
        )
    if value is not None and not instance.adaptive_draft_length:
        raise ConfigError(
            f"draft_level_cost={level_cost} and draft_node_cost={value} are for drafts that end where more would not "
            f"pay: give adaptive_draft_length=True, too, or leave them out"
        )


@frozen(kw_only=True, slots=False)
class DraftStopConfig:
    """The keys of methods that can stop drafting where more is expected to cost more than it gains: their config
    classes inherit from this one.

    draft_level_cost, draft_node_cost: what drafting another level of nodes and verifying another node cost, in passes
    of the target over one token. None: measured.
    """

    adaptive_draft_length: bool = field(default=False, validator=flag)
    draft_level_cost: float | None = field(default=None, validator=number(0, MOST_COST, optional=True))
    draft_node_cost: float | None = field(default=None, validator=[number(0, MOST_COST, optional=True), _both_costs])


@frozen(kw_only=True)
class SpeculativeConfig:
    """How to speculate: the core's own keys, and instances of the config classes of the method and the verifier.

    num_speculative_tokens: most draft tokens (for trees: nodes) per request and step.
    disable_by_batch_size: no drafts while more requests than this are running.
    verifier: the rule that decides what is accepted; "auto": a lossless one that fits the draft.
    """

    method: str
    num_speculative_tokens: int = field(validator=whole_number(1, MOST_DRAFT_TOKENS))
    disable_by_batch_size: int | None = field(default=None, validator=whole_number(1, MOST_DRAFT_TOKENS, optional=True))
    verifier: str = field(default=AUTO, validator=text())
    options: Any = None
    verifier_options: Any = None

    @classmethod
    def core_keys(cls) -> set[str]:
        return {attribute.name for attribute in fields(cls)} - {"options", "verifier_options"}

    @classmethod
    def from_mapping(
        cls,
        mapping: Mapping[str, Any],
        method_config: type,
        verifier_config: type | None = None,
        default_num_speculative_tokens: Callable[[Any], int] | None = None,
    ) -> SpeculativeConfig:
        """One flat mapping of the core's keys, the method's and the verifier's, of which none may have the name of the
        core's. default_num_speculative_tokens: (the method's config) -> the number where the mapping has none. Raises
        ConfigError that names the nearest key."""
        own = {attribute.name for attribute in fields(method_config)} - cls.core_keys()
        verifiers = {attribute.name for attribute in fields(verifier_config)} if verifier_config else set()
        where = f"speculative_config of method {mapping['method']!r}"
        known = cls.core_keys() | own | verifiers
        for key in mapping:
            if key not in known:
                raise _foreign_key(key, known, where)
        if mapping.get("num_speculative_tokens") is None and default_num_speculative_tokens is None:
            raise ConfigError(
                f"{where} says no num_speculative_tokens: give the number of tokens to draft per step, such as 5"
            )
        try:
            options = method_config(**{key: value for key, value in mapping.items() if key in own})
            chosen = {key: value for key, value in mapping.items() if key in verifiers}
            verifier_options = verifier_config(**chosen) if verifier_config else None
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{where} is not complete: {error}") from error
        rest = {key: value for key, value in mapping.items() if key in cls.core_keys()}
        if default_num_speculative_tokens is not None and rest.get("num_speculative_tokens") is None:
            rest["num_speculative_tokens"] = default_num_speculative_tokens(options)
        return cls(**rest, options=options, verifier_options=verifier_options)

    def compute_hash(self) -> str:
        """A hex digest of what changes the computation, the same in every process."""
        return config_hash(self)


@frozen(kw_only=True)
class EngineConfig:
    """Everything about an engine but speculation. None: chosen from the model and the machine.

    revision, code_revision, tokenizer_revision: a branch, tag or commit of the hub's repository: of the weights, of
    code that trust_remote_code allows, of the tokenizer (None: revision). dtype: a name, vLLM's "half" and "float" too,
    or torch's. device: "cpu", "cuda" or "cuda:1". quantization: the method's name, or transformers' quantization config
    as a mapping or object; a checkpoint that is quantised needs none. tokenizer_mode "slow": the slow tokenizer where
    transformers still has one. enforce_eager changes nothing: there are no CUDA graphs yet. disable_log_stats: no lines
    in the log about the speed. metrics_prefix: of every metric's name.
    """

    model: str | Path = field(validator=checkpoint())
    runner: str = field(default="auto", validator=one_of("auto", "generate"), metadata=UNHASHED)
    tokenizer_mode: str = field(default="auto", validator=one_of("auto", "slow"), metadata=UNHASHED)
    trust_remote_code: bool = field(default=False, validator=flag)
    revision: str | None = field(default=None, validator=text(optional=True))
    code_revision: str | None = field(default=None, validator=text(optional=True))
    tokenizer_revision: str | None = field(default=None, validator=text(optional=True), metadata=UNHASHED)
    dtype: str = field(
        default="auto", converter=_dtype_name, validator=one_of("auto", "float32", "float16", "bfloat16")
    )
    device: str | None = field(default=None, validator=text(optional=True))
    quantization: Any = None
    tensor_parallel_size: int = field(default=1, validator=_one_process)
    seed: int | None = field(default=None, validator=whole_number(-(2**63), 2**64, optional=True), metadata=UNHASHED)
    enforce_eager: bool = field(default=False, validator=flag, metadata=UNHASHED)
    max_model_len: int | None = field(default=None, validator=whole_number(1, optional=True))
    max_num_seqs: int = field(default=256, validator=whole_number(1))
    max_num_batched_tokens: int = field(default=2048, validator=whole_number(1))
    block_size: int = field(default=16, validator=whole_number(1))
    num_kv_blocks: int | None = field(default=None, validator=whole_number(1, optional=True), metadata=UNHASHED)
    gpu_memory_utilization: float | None = field(  # on a CPU: of its free memory
        default=None, validator=number(0, 1, low_open=True, optional=True), metadata=UNHASHED
    )
    disable_log_stats: bool = field(default=False, validator=flag, metadata=UNHASHED)
    metrics_prefix: str = field(default="specdec", validator=_metrics_prefix, metadata=UNHASHED)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], other_keys: AbstractSet[str] = frozenset()) -> EngineConfig:
        """other_keys: what whoever calls takes besides, for the error about an unknown key."""
        known = {attribute.name for attribute in fields(cls)}
        for key in mapping:
            if key not in known:
                raise unknown_key(key, known | other_keys, "LLM")
        return cls(**mapping)

    def compute_hash(self) -> str:
        """A hex digest of what changes the computation, the same in every process."""
        return config_hash(self)


def speculative_mapping(mapping: Any) -> dict[str, Any]:
    """speculative_config as users write it, with its method named, or with a draft model to tell it by. A name in
    square brackets, as older versions of vLLM write it, is a method's, also where a model's would stand. Raises
    ConfigError.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"speculative_config={mapping!r} must be a dict such as {{'method': 'ngram', ...}}")
    plain = dict(mapping)
    method, model = _unbracketed(plain.get("method")), plain.get("model")
    if bracketed(model):
        del plain["model"]
        if method not in (None, _unbracketed(model)):
            raise ConfigError(f"speculative_config names two methods, {method!r} and {model!r}: leave one out")
        method = _unbracketed(model)
    if method is None and isinstance(plain.get("model"), str | Path):
        return {key: value for key, value in plain.items() if key != "method"}
    if not isinstance(method, str):
        raise ConfigError(
            f"speculative_config names no method (method={method!r}): give one that `spec-decode plugins` lists"
        )
    return {**plain, "method": method}


def bracketed(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("[") and name.endswith("]")


def _unbracketed(name: Any) -> Any:
    return name[1:-1] if bracketed(name) else name


def _foreign_key(key: object, known: AbstractSet[str], where: str) -> ConfigError:
    """A key of draft checkpoints is no typing error, so there is no near one to guess."""
    if key in {attribute.name for attribute in fields(DraftModelConfig)}:
        return ConfigError(
            f"{where} has no key {key!r}: the method takes no draft model. Remove it, or choose a method that does. "
            f"The keys are {', '.join(sorted(known))}"
        )
    return unknown_key(key, known, where)


def unknown_key(key: object, known: AbstractSet[str], where: str) -> ConfigError:
    near = get_close_matches(str(key), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "remove it."
    return ConfigError(f"{where} has no key {key!r}: {hint} The keys are {', '.join(sorted(known))}")
