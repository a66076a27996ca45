"""Turns the keywords of `LLM` into checked options."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from os.path import isdir
from pathlib import Path
from typing import Any

import torch
from attrs import NOTHING, evolve, fields_dict, frozen

from specdec_core.api.old_vllm_arguments import OLD_KEYS, bracketed, level_of_caller, unbracketed, without_old_keys
from specdec_core.api.prompts import load_tokenizer
from specdec_core.api.several_methods import one_per_method, refuse_repeated
from specdec_core.api.vllm_arguments import without_vllm_arguments, without_vllm_keys
from specdec_core.config.draft_options import DraftModelConfig
from specdec_core.config.engine import EngineConfig
from specdec_core.config.fields import names_checkpoint, shown
from specdec_core.config.file import KEYS
from specdec_core.config.idle import idle_values
from specdec_core.config.speculative import AUTO, SpeculativeConfig
from specdec_core.contracts.proposer import ProposerSpec
from specdec_core.engine import design
from specdec_core.engine.design import Design, Speculating
from specdec_core.engine.draft_kind import explain_draft_kind, explain_target_kind, refuse_other_kind
from specdec_core.engine.plugin_errors import building
from specdec_core.errors import ConfigError, NoDraftError, PluginError, nearest
from specdec_core.models.checkpoint import Checkpoint
from specdec_core.models.embedded import resolve_model
from specdec_core.models.load import ModelSource, find_device, load_config
from specdec_core.plugins import Plugins
from specdec_core.plugins.discovery import MODEL_NAME

logger = logging.getLogger(__name__)

DRAFTS = "drafts"
"""A subfolder of a target's folder: it has a draft checkpoint per method, each in a folder of the method's name."""

MAIN_KEYS = ("method", "model")
"""Keys of speculative_config, of which one must be given."""


@frozen(eq=False)
class Prepared:
    """What `prepare` returns: the engine's checked options (`config`), the loaded plugins, the checked options of
    speculation (None: plain decoding) and the tokenizer (None with skip_tokenizer_init=True)."""

    config: EngineConfig
    plugins: Plugins
    speculative: Speculating
    tokenizer: Any


def prepare(
    model: str | Path,
    *,
    tokenizer: str | Path | None = None,
    skip_tokenizer_init: bool = False,
    speculative_config: Any = None,
    plugins: Plugins | None = None,
    **engine_config: Any,
) -> Prepared:
    """Check the keywords of `LLM` and load the plugins and the tokenizer that they name, but no weights. Issues one
    warning if options that change nothing have other values than their defaults. Raises ConfigError, PluginError or
    CompatibilityError."""
    if not isinstance(skip_tokenizer_init, bool):
        raise ConfigError(f"skip_tokenizer_init={shown(skip_tokenizer_init)} must be True or False")
    if tokenizer is not None and not names_checkpoint(tokenizer):
        raise ConfigError(f"tokenizer={shown(tokenizer)} must be a folder or a name, or None for the model's own")
    if plugins is not None and not hasattr(plugins, "proposer"):
        raise ConfigError(f"plugins={shown(plugins)} must be what Plugins.load() returns, or None")
    engine_config, speculative_config = without_old_keys(engine_config, speculative_config)
    engine_config = without_vllm_arguments(engine_config)
    config = EngineConfig.from_mapping({"model": model, **engine_config}, other_keys=KEYS | {"plugins"} | OLD_KEYS)
    if skip_tokenizer_init:
        mode = config.tokenizer_mode if config.tokenizer_mode != "auto" else None
        given = {"tokenizer": tokenizer, "tokenizer_mode": mode, "tokenizer_revision": config.tokenizer_revision}
        if idle := [f"{name}={shown(value)}" for name, value in given.items() if value is not None]:
            raise ConfigError(
                f"skip_tokenizer_init=True loads no tokenizer, and {' and '.join(idle)} would choose one: leave out "
                f"the one or the other"
            )
    plugins, device = plugins or Plugins.load(), find_device(config.device)
    config = evolve(config, model=resolve_model(config.model, plugins.models))
    tokenizer = None if tokenizer is None else resolve_model(tokenizer, plugins.models)
    parsed, idle = [], idle_values(fields_dict(EngineConfig), engine_config)
    for each in () if speculative_config is None else one_per_method(speculative_config, plugins):
        flat = fill_in(each, model, plugins)
        parsed.append(parse_speculative(flat, plugins, device))
        idle += idle_values(fields_dict(DraftModelConfig) | fields_dict(type(parsed[-1].options)), flat)
    refuse_repeated(parsed)
    speculative = tuple(parsed) if len(parsed) > 1 else parsed[0] if parsed else None
    if idle:
        warnings.warn("; ".join(dict.fromkeys(idle)), stacklevel=level_of_caller())
    with explain_target_kind(config.model, config.revision, plugins):
        load_config(ModelSource.of_target(config, device))  # its errors come before the tokenizer's
        loaded = None if skip_tokenizer_init else load_tokenizer(config, tokenizer)
    return Prepared(config, plugins, speculative, loaded)


def dry_run(model: str | Path, **keywords: Any) -> Design:
    """Do everything that `LLM` does before it loads weights, and return the engine's `Design`, which has the memory
    plan. Takes the keywords of `LLM` and raises the same errors, except those that only loading weights can cause."""
    prepared = prepare(model, **keywords)
    return design.dry_run(prepared.config, prepared.plugins, prepared.speculative, prepared.tokenizer)


def parse_speculative(mapping: Mapping[str, Any], plugins: Plugins, device: torch.device) -> SpeculativeConfig:
    """Parse a speculative_config that has a `method`. It may also have the keys of the method and of the verifier.

    device: the device that the engine runs on. A method's default of num_speculative_tokens may depend on it.
    """
    verifier, verifier_config = mapping.get("verifier", AUTO), None
    if isinstance(verifier, str) and verifier != AUTO:
        verifier_config = plugins.verifier(verifier).config
    method = plugins.proposer(mapping["method"])
    number = method.num_speculative_tokens
    default = None if number is None else lambda options: number(options, device)
    draft = (method, mapping.get("model"), mapping.get("revision"), plugins)
    refuse_other_kind(*draft)
    with explain_draft_kind(*draft), building(f"proposer {method.name!r}", "say how many tokens to draft"):
        config = SpeculativeConfig.from_mapping(mapping, method.config, verifier_config, default)
    if method.advice is not None:
        with building(f"proposer {method.name!r}", "give its advice"):
            if advice := method.advice(config.options, mapping):
                logger.info("%s", advice)
    return config


def fill_in(given: Any, target: str | Path, plugins: Plugins) -> dict[str, Any]:
    """Complete the user's speculative_config and return it as a dict, without the keys that change nothing. If it names
    a draft checkpoint but no method, add the method that recognizes the checkpoint. If the method needs a draft
    checkpoint and none is named, add the one in the folder drafts/METHOD inside the target's folder.

    given: speculative_config as the user wrote it.
    target: the target model as the user named it: a folder, a name on the model hub, or the name of an embedded model
        (one that is installed as a Python package).

    Raises ConfigError, or PluginError if not exactly one installed method recognizes the checkpoint.
    """
    mapping = speculative_mapping(given, lambda name: _names_method(name, plugins))
    mapping = without_vllm_keys(mapping, lambda: _known_keys(mapping, plugins))
    if names_checkpoint(mapping.get("model")):
        mapping["model"] = resolve_model(mapping["model"], plugins.models)
    if "method" not in mapping:
        mapping = {"method": _detected(str(mapping["model"]), mapping.get("revision"), plugins), **mapping}
    method = plugins.proposer(mapping["method"])
    if method.name != mapping["method"]:
        warnings.warn(f"the method {mapping['method']!r} is called {method.name!r} here: name it so", stacklevel=2)
        mapping["method"] = method.name
    model = fields_dict(method.config).get("model")
    if mapping.get("model") is None and model is not None and model.default is NOTHING:
        folder = Path(resolve_model(target, plugins.models), DRAFTS, method.name)
        mapping["model"] = _shipped(method, folder, target, mapping.get("revision"))
    return mapping


def speculative_mapping(mapping: Any, names_method: Callable[[str], bool] = lambda name: False) -> dict[str, Any]:
    """Check a speculative_config as users write it, and return it as a dict. It must name a method or a draft model. A
    name in square brackets, such as "[ngram]" in older versions of vLLM, is taken as a method, even if it is given as
    `model`, and so is one for which names_method returns True. Raises ConfigError."""
    if isinstance(mapping, SpeculativeConfig):
        mapping = mapping.as_mapping()
    if not isinstance(mapping, Mapping):
        raise ConfigError(
            f"speculative_config={shown(mapping)} must be the name of a method, or a dict such as "
            f"{{'method': 'ngram', ...}}"
        )
    plain = dict(mapping)
    method, model = unbracketed(plain.get("method")), plain.get("model")
    if bracketed(model) or (isinstance(model, str) and names_method(model)):
        del plain["model"]
        if method not in (None, unbracketed(model)):
            raise ConfigError(f"speculative_config names two methods, {shown(method)} and {model!r}: leave one out")
        method = unbracketed(model)
    if method is None and names_checkpoint(plain.get("model")):
        return {key: value for key, value in plain.items() if key != "method"}
    if not isinstance(method, str):
        for key in plain:
            if key not in MAIN_KEYS and (near := nearest(str(key), MAIN_KEYS)):
                raise ConfigError(
                    f"speculative_config names no method, but has a key {shown(key)}: did you mean {near!r}?"
                )
        raise ConfigError(
            f"speculative_config names no method (method={shown(method)}): give one that `spec-decode plugins` lists"
        )
    return {**plain, "method": method}


def _names_method(name: str, plugins: Plugins) -> bool:
    """Whether a name that is given as `model` is that of an installed method. A folder or an embedded model of the same
    name comes first."""
    if not MODEL_NAME.fullmatch(name) or isdir(name) or resolve_model(name, plugins.models) != name:
        return False
    return name in plugins.proposers() or _why_no_method(name, plugins) is None


def _why_no_method(name: str, plugins: Plugins) -> PluginError | None:
    """The error that says why no method of this name can be used; None if one can."""
    try:
        plugins.proposer(name)
    except PluginError as error:
        return error
    return None


def _detected(model: str, revision: str | None, plugins: Plugins) -> str:
    """The name of the method that recognizes a draft checkpoint. Raises ConfigError or PluginError."""
    checkpoint = Checkpoint(model, revision)
    try:
        config = checkpoint.config
    except ConfigError as error:
        if isdir(model) or not MODEL_NAME.fullmatch(model):
            raise
        raise ConfigError(f"{error}. It is no method, either: {_why_no_method(model, plugins)}") from error
    return plugins.detect(config, checkpoint.shapes).name


def _known_keys(mapping: Mapping[str, Any], plugins: Plugins) -> set[str]:
    """The keys that a speculative_config may have with one of the installed methods and with its own verifier."""
    configs: list[type | None] = [DraftModelConfig]
    configs += [plugins.proposer(name).config for name in plugins.proposers() if not _why_no_method(name, plugins)]
    verifier = mapping.get("verifier", AUTO)
    if isinstance(verifier, str) and verifier != AUTO:
        configs.append(plugins.verifier(verifier).config)
    return SpeculativeConfig.core_keys().union(*(fields_dict(config) for config in configs if config is not None))


def _shipped(method: ProposerSpec, folder: Path, target: str | Path, revision: Any) -> str:
    """Return `folder` as text if it exists. Raises ConfigError if it does not, or if a revision is given, since only
    repositories on the model hub have revisions.

    folder: drafts/METHOD inside the target's folder, where a target may bring a draft checkpoint for this method.
    """
    if folder.is_dir():
        if revision is None:
            return str(folder)
        raise ConfigError(
            f"speculative_config has revision={shown(revision)}, which is of a repository, but has no model: give its "
            f"name as model, or leave revision out for the draft that comes with the target {str(target)!r}"
        )
    known = _published(method.published, str(target))
    advice = f"give model={known!r}, which was published for it" if known else "give the draft's folder or repository"
    if method.train is not None:
        advice += f", or train one with `spec-decode train {method.name}`"
    raise NoDraftError(
        f"speculative_config of method {method.name!r} names no model, and no draft comes with the target "
        f"{str(target)!r}: {advice}"
    )


def _published(drafts: Mapping[str, str], target: str) -> str | None:
    """Look up the draft checkpoint for a target in a method's list. Returns its name on the model hub, or None.
    Compares only the last part of the target's name (after the "/"), which copies of a model usually keep.

    drafts: the method's list, as {name of a target: name of its draft checkpoint}.
    """
    name = target.rstrip("/").rpartition("/")[2].lower()
    return next((draft for of, draft in drafts.items() if of.rpartition("/")[2].lower() == name), None)
