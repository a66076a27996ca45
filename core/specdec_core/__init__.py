"""specdec-core: speculative decoding for PyTorch language models, where every way of drafting is a plugin.

The names below are the public ones. Each is imported when it is first used, so that `import specdec_core`, and with it
every plugin's module, costs no import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "async_llm": ("AsyncLLM",),
    "checkpoint": ("Checkpoint",),
    "config": ("DraftModelConfig", "DraftSamplingConfig", "DraftStopConfig", "EngineConfig", "SpeculativeConfig"),
    "config_file": ("load_config_file",),
    "drafting": (
        "DraftBuilder",
        "DraftPass",
        "DraftStop",
        "DynamicTree",
        "Grown",
        "Level",
        "StaticTree",
        "Stopping",
        "TreeGrower",
        "grow",
    ),
    "engine": ("Engine",),
    "engine.request": ("Piece", "Request"),
    "errors": ("CapacityError", "CompatibilityError", "ConfigError", "PluginError", "SpecdecError"),
    "hookspecs": ("hookimpl",),
    "kv_manager": ("KVManager", "KVManagerSpec"),
    "llm": ("LLM",),
    "losses": ("soft_cross_entropy",),
    "merging": ("merge_drafts",),
    "metrics": ("Counter", "DraftCounts", "Vector"),
    "outputs": ("CompletionOutput", "RequestOutput", "StreamOutput"),
    "plugins": ("PluginInfo", "PluginWarning", "Plugins"),
    "prompts": ("load_tokenizer",),
    "proposer": ("PLUGIN_API", "BuildContext", "CausalLM", "LayerAttention", "Proposer", "ProposerSpec"),
    "sampling.logprobs": ("Logprob",),
    "sampling_params": ("SamplingParams",),
    "target.load": ("resolve_model",),
    "target.outline": ("Outline", "outline_draft"),
    "target.taps": ("register_tap",),
    "target.training": ("load_training_target",),
    "token_tree": ("TokenTree",),
    "training": ("Trainee", "TrainingBatch", "TrainingRecipe", "TrainingTarget"),
    "types": (
        "DEAD",
        "Draft",
        "DraftTree",
        "KVLayout",
        "KVMetadata",
        "Observation",
        "Plan",
        "ProposerBatch",
        "RandomSource",
        "RequestView",
        "StepCosts",
        "StepReport",
        "Stream",
        "TargetInfo",
        "Verdict",
        "Visibility",
    ),
    "validators": ("flag", "number", "one_of", "text", "whole_number"),
    "verifier": ("Verifier", "VerifierSpec"),
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_MODULES]  # noqa: PLE0604

if TYPE_CHECKING:
    from specdec_core.async_llm import (
        AsyncLLM as AsyncLLM,
    )
    from specdec_core.checkpoint import Checkpoint as Checkpoint
    from specdec_core.config import (
        DraftModelConfig as DraftModelConfig,
        DraftSamplingConfig as DraftSamplingConfig,
        DraftStopConfig as DraftStopConfig,
        EngineConfig as EngineConfig,
        SpeculativeConfig as SpeculativeConfig,
    )
    from specdec_core.config_file import (
        load_config_file as load_config_file,
    )
    from specdec_core.drafting import (
        DraftBuilder as DraftBuilder,
        DraftPass as DraftPass,
        DraftStop as DraftStop,
        DynamicTree as DynamicTree,
        Grown as Grown,
        Level as Level,
        StaticTree as StaticTree,
        Stopping as Stopping,
        TreeGrower as TreeGrower,
        grow as grow,
    )
    from specdec_core.engine import (
        Engine as Engine,
    )
    from specdec_core.engine.request import (
        Piece as Piece,
        Request as Request,
    )
    from specdec_core.errors import (
        CapacityError as CapacityError,
        CompatibilityError as CompatibilityError,
        ConfigError as ConfigError,
        PluginError as PluginError,
        SpecdecError as SpecdecError,
    )
    from specdec_core.hookspecs import (
        hookimpl as hookimpl,
    )
    from specdec_core.kv_manager import (
        KVManager as KVManager,
        KVManagerSpec as KVManagerSpec,
    )
    from specdec_core.llm import (
        LLM as LLM,
    )
    from specdec_core.losses import soft_cross_entropy as soft_cross_entropy
    from specdec_core.merging import (
        merge_drafts as merge_drafts,
    )
    from specdec_core.metrics import (
        Counter as Counter,
        DraftCounts as DraftCounts,
        Vector as Vector,
    )
    from specdec_core.outputs import (
        CompletionOutput as CompletionOutput,
        RequestOutput as RequestOutput,
        StreamOutput as StreamOutput,
    )
    from specdec_core.plugins import (
        PluginInfo as PluginInfo,
        Plugins as Plugins,
        PluginWarning as PluginWarning,
    )
    from specdec_core.prompts import load_tokenizer as load_tokenizer
    from specdec_core.proposer import (
        PLUGIN_API as PLUGIN_API,
        BuildContext as BuildContext,
        CausalLM as CausalLM,
        LayerAttention as LayerAttention,
        Proposer as Proposer,
        ProposerSpec as ProposerSpec,
    )
    from specdec_core.sampling.logprobs import (
        Logprob as Logprob,
    )
    from specdec_core.sampling_params import (
        SamplingParams as SamplingParams,
    )
    from specdec_core.target.load import resolve_model as resolve_model
    from specdec_core.target.outline import (
        Outline as Outline,
        outline_draft as outline_draft,
    )
    from specdec_core.target.taps import register_tap as register_tap
    from specdec_core.target.training import load_training_target as load_training_target
    from specdec_core.token_tree import TokenTree as TokenTree
    from specdec_core.training import (
        Trainee as Trainee,
        TrainingBatch as TrainingBatch,
        TrainingRecipe as TrainingRecipe,
        TrainingTarget as TrainingTarget,
    )
    from specdec_core.types import (
        DEAD as DEAD,
        Draft as Draft,
        DraftTree as DraftTree,
        KVLayout as KVLayout,
        KVMetadata as KVMetadata,
        Observation as Observation,
        Plan as Plan,
        ProposerBatch as ProposerBatch,
        RandomSource as RandomSource,
        RequestView as RequestView,
        StepCosts as StepCosts,
        StepReport as StepReport,
        Stream as Stream,
        TargetInfo as TargetInfo,
        Verdict as Verdict,
        Visibility as Visibility,
    )
    from specdec_core.validators import (
        flag as flag,
        number as number,
        one_of as one_of,
        text as text,
        whole_number as whole_number,
    )
    from specdec_core.verifier import (
        Verifier as Verifier,
        VerifierSpec as VerifierSpec,
    )


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
