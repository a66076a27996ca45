"""The configuration of speculation: `SpeculativeConfig`, with the options that every method has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set as AbstractSet
from typing import TYPE_CHECKING, Any

from attrs import field, fields, fields_dict, frozen

from specdec_core.config.draft_options import DraftHeadConfig, DraftModelConfig, DraftWindowConfig
from specdec_core.config.fields import option, optional_flag, shown, text, unknown_key, whole_number
from specdec_core.config.hashing import config_hash
from specdec_core.config.options import PARSED, is_key
from specdec_core.errors import ConfigError

MOST_DRAFT_TOKENS = 2**16
AUTO = "auto"
"""The verifier option that selects a lossless verifier for each draft."""


@frozen(kw_only=True, init=False)
class SpeculativeConfig:
    """How to speculate, as `LLM` takes it: SpeculativeConfig(method="ngram", num_speculative_tokens=3,
    prompt_lookup_max=4). Keywords are the keys of a speculative_config, those of the method and of the verifier
    included, and each is an attribute, too.

    `LLM` knows the target and the plugins. It checks the keys of method and verifier and fills in what is left out:
    `llm.speculative_config` is the complete config. In a config that is not complete, `options` is a dict of these
    keys, and `method` and `num_speculative_tokens` may be None.

    Raises ConfigError if the value of a key that every method has is out of range.
    """

    method: str = option(
        None,
        "The proposer's name, as `spec-decode plugins` lists it. None: detected from the draft checkpoint in model.",
        allowed="a name, or None",
    )
    num_speculative_tokens: int = option(
        whole_number(1, MOST_DRAFT_TOKENS, optional=True),
        "Most draft tokens of a request in a step: of a tree, its nodes. None: the method's default, if it has one.",
    )
    disable_by_batch_size: int | None = option(
        whole_number(1, MOST_DRAFT_TOKENS, optional=True),
        "Draft nothing while more requests than this are running. 1: draft only for a request that runs alone. None: "
        "draft however many run.",
    )
    adaptive_draft_length: bool | None = option(
        optional_flag,
        "Draft and verify as many tokens in each step as are expected to lower the time per output token, on average "
        "over the requests that run; num_speculative_tokens at most, and none where plain decoding is faster: by the "
        "acceptance of each request's earlier drafts and by measured costs. False: as many tokens as there are. None: "
        "True, unless num_speculative_tokens is given.",
    )
    verifier: str = option(
        text(),
        "The rule that decides which draft tokens are accepted. 'auto': a lossless one that fits the draft.",
        default=AUTO,
        allowed="'auto' or a verifier's name",
    )
    options: Any = field(
        default=None,
        metadata={
            "help": "The method's own keys, as its config class. In a config that is not complete: a dict of all keys "
            "that are not of this class.",
            **PARSED,
        },
    )
    verifier_options: Any = field(
        default=None, metadata={"help": "The verifier's own keys, as its config class.", **PARSED}
    )

    def __init__(self, *, options: Any = None, **keys: Any) -> None:
        own = {key: keys.pop(key) for key in [*keys] if key not in fields_dict(SpeculativeConfig)}
        if options is not None and own:
            raise unknown_key(next(iter(own)), self.core_keys(), "a SpeculativeConfig with options")
        self.__attrs_init__(options=own if options is None else options, **keys)

    if not TYPE_CHECKING:  # a type checker is to know the fields only

        def __getattr__(self, name: str) -> Any:
            """A key of the method or of the verifier. Raises AttributeError if it is not known or not given."""
            if name.startswith("_") or name in fields_dict(SpeculativeConfig):  # while it is copied or unpickled
                raise AttributeError(name)
            flat = self.as_mapping()
            if name not in flat:
                raise AttributeError(f"this SpeculativeConfig has no key {name!r}: it has {', '.join(sorted(flat))}")
            return flat[name]

    @property
    def is_complete(self) -> bool:
        """Whether the keys of method and verifier are checked, as in `llm.speculative_config`."""
        return not isinstance(self.options, Mapping)

    def as_mapping(self) -> dict[str, Any]:
        """The keys and values as one flat dict, which `LLM` takes as well."""
        keys = [attribute.name for attribute in fields(SpeculativeConfig) if is_key(attribute)]
        own = {**_own_values(self.options), **_own_values(self.verifier_options)}
        return {**own, **{key: getattr(self, key) for key in keys}}

    def use_eagle(self) -> bool:
        """Whether drafts come from a head with attention layers, which reads the target's hidden states at every token
        and keeps keys and values of its own: the methods `eagle`, `eagle3` and `mtp`. Decided by the options that the
        method's config class inherits. Raises ConfigError if the config is not complete."""
        self._check_complete("use_eagle")
        return isinstance(self.options, DraftHeadConfig) and isinstance(self.options, DraftWindowConfig)

    def compute_hash(self) -> str:
        """A key under which to keep what was measured or computed with this config: the sha256, in hex, of every value
        that affects what is drafted and accepted. The draft checkpoint counts by the contents of its folder, so copies
        have the same hash, and a changed weight changes it; a name on the model hub counts as it is. The target is not
        included: its hash is that of `EngineConfig`. Reads the checkpoint's files.

        Raises ConfigError if the config is not complete, or if a file cannot be read.
        """
        self._check_complete("compute_hash")
        return config_hash(self)

    def _check_complete(self, method: str) -> None:
        if not self.is_complete:
            raise ConfigError(
                f"{method}() is of a complete config, and this one may lack defaults: give it to LLM as "
                f"speculative_config, and ask llm.speculative_config"
            )

    @classmethod
    def core_keys(cls) -> set[str]:
        return {attribute.name for attribute in fields(cls) if is_key(attribute)}

    @classmethod
    def from_mapping(
        cls,
        mapping: Mapping[str, Any],
        method_config: type,
        verifier_config: type | None = None,
        default_num_speculative_tokens: Callable[[Any], int] | None = None,
    ) -> SpeculativeConfig:
        """Make a config from a flat mapping with the keys of this class, of the method and of the verifier. No two of
        these may have a key of the same name.

        method_config: the method's config class.
        verifier_config: the verifier's config class; None: the verifier has no keys.
        default_num_speculative_tokens: a function of the method's config that returns the num_speculative_tokens to use
            if the mapping has none. None: the mapping must have it.

        Raises ConfigError. For an unknown key, the error suggests the nearest known one.
        """
        own = fields_dict(method_config).keys() - cls.core_keys()
        verifiers = fields_dict(verifier_config).keys() if verifier_config else set()
        where = f"speculative_config of method {mapping['method']!r}"
        known = cls.core_keys() | own | verifiers
        for key in mapping:
            if key not in known and not _needs_no_draft_model(key, mapping[key]):
                raise _foreign_key(key, known, where)
        if mapping.get("num_speculative_tokens") is None and default_num_speculative_tokens is None:
            raise ConfigError(
                f"{where} has no num_speculative_tokens: give the number of tokens to draft per step, such as 5"
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
        is_open = rest.get("num_speculative_tokens") is None
        if rest.get("adaptive_draft_length") is None:
            rest["adaptive_draft_length"] = is_open
        if default_num_speculative_tokens is not None and is_open:
            rest["num_speculative_tokens"] = default_num_speculative_tokens(options)
            whole_number(1, MOST_DRAFT_TOKENS)(None, fields(cls).num_speculative_tokens, rest["num_speculative_tokens"])
        return cls(**rest, options=options, verifier_options=verifier_options)


def _own_values(options: Any) -> Mapping[str, Any]:
    """The keys and values of a method's or a verifier's options. Of a dict, which is not checked yet: the dict. None
    has none."""
    if options is None or isinstance(options, Mapping):
        return options or {}
    return {attribute.name: getattr(options, attribute.name) for attribute in fields(type(options)) if attribute.init}


def _needs_no_draft_model(key: object, value: Any) -> bool:
    """Whether a method without a draft model can take this key of `DraftModelConfig`: if the value is None or the
    default, or if the key is a flag, which only says how a draft model runs. Raises ConfigError if a flag has a wrong
    value."""
    attribute = fields_dict(DraftModelConfig).get(key) if isinstance(key, str) else None
    if attribute is None or value is None:
        return attribute is not None
    if isinstance(attribute.default, bool):
        attribute.validator(None, attribute, value)  # type: ignore[misc]
        return True
    return type(value) is type(attribute.default) and bool(value == attribute.default)


def _foreign_key(key: object, known: AbstractSet[str], where: str) -> ConfigError:
    """Make the error for a key that speculative_config does not have with this method. For a key of
    `DraftModelConfig`, the error says that the method takes no draft model. Else it suggests the nearest known key.

    where: the speculative_config in which the key was found, as text for the message.
    """
    if key in fields_dict(DraftModelConfig):
        return ConfigError(
            f"{where} has no key {shown(key)}: the method takes no draft model. Remove it, or choose a method that "
            f"does. The keys are {', '.join(sorted(known))}"
        )
    return unknown_key(key, known, where)
