# The public names of specdec-core and the modules that define them: `__init__.py` reads them from here.

from specdec_core.api.async_llm import AsyncLLM as AsyncLLM
from specdec_core.api.llm import LLM as LLM
from specdec_core.api.outputs import (
    CompletionOutput as CompletionOutput,
    RequestOutput as RequestOutput,
    StreamOutput as StreamOutput,
)
from specdec_core.api.prompts import TokenizedPrompt as TokenizedPrompt, load_tokenizer as load_tokenizer
from specdec_core.api.token_drafter import TokenDrafter as TokenDrafter, TokenRequest as TokenRequest
from specdec_core.config.draft_options import (
    DraftHeadConfig as DraftHeadConfig,
    DraftModelConfig as DraftModelConfig,
    DraftSamplingConfig as DraftSamplingConfig,
    DraftTreeConfig as DraftTreeConfig,
    DraftWindowConfig as DraftWindowConfig,
)
from specdec_core.config.engine import EngineConfig as EngineConfig
from specdec_core.config.fields import (
    Check as Check,
    check_text as check_text,
    checked_vocab_size as checked_vocab_size,
    flag as flag,
    must as must,
    number as number,
    one_of as one_of,
    option as option,
    optional_checkpoint as optional_checkpoint,
    optional_flag as optional_flag,
    shown as shown,
    text as text,
    whole_number as whole_number,
)
from specdec_core.config.file import load_config_file as load_config_file
from specdec_core.config.sampling import SamplingParams as SamplingParams
from specdec_core.config.speculative import SpeculativeConfig as SpeculativeConfig
from specdec_core.config.structured_outputs import StructuredOutputs as StructuredOutputs
from specdec_core.config.token_tree import TokenTree as TokenTree
from specdec_core.contracts.draft import DEAD as DEAD, Draft as Draft, DraftTree as DraftTree
from specdec_core.contracts.grammar import (
    GrammarCompiler as GrammarCompiler,
    GrammarContext as GrammarContext,
    GrammarMatcher as GrammarMatcher,
    GrammarSpec as GrammarSpec,
)
from specdec_core.contracts.hooks import hookimpl as hookimpl
from specdec_core.contracts.kv import (
    TARGET as TARGET,
    KVContext as KVContext,
    KVLayout as KVLayout,
    KVManager as KVManager,
    KVManagerSpec as KVManagerSpec,
    KVMetadata as KVMetadata,
    Visibility as Visibility,
)
from specdec_core.contracts.ops import OpsContext as OpsContext, OpsSpec as OpsSpec
from specdec_core.contracts.proposer import (
    PLUGIN_API as PLUGIN_API,
    BuildContext as BuildContext,
    CausalLM as CausalLM,
    Embedding as Embedding,
    LayerAttention as LayerAttention,
    LevelBudget as LevelBudget,
    Observation as Observation,
    OutputHead as OutputHead,
    Plan as Plan,
    Proposer as Proposer,
    ProposerBatch as ProposerBatch,
    ProposerSpec as ProposerSpec,
    RequestView as RequestView,
    TopTokens as TopTokens,
)
from specdec_core.contracts.report import StepReport as StepReport
from specdec_core.contracts.target import TargetInfo as TargetInfo
from specdec_core.contracts.training import (
    Trainee as Trainee,
    TrainingBatch as TrainingBatch,
    TrainingRecipe as TrainingRecipe,
    TrainingTarget as TrainingTarget,
)
from specdec_core.contracts.verifier import (
    RandomSource as RandomSource,
    Stream as Stream,
    Verdict as Verdict,
    Verifier as Verifier,
    VerifierSpec as VerifierSpec,
)
from specdec_core.drafting import (
    DraftBuilder as DraftBuilder,
    DraftPass as DraftPass,
    DraftSlots as DraftSlots,
    FeatureProposer as FeatureProposer,
    Grown as Grown,
    LastHiddenProposer as LastHiddenProposer,
    Level as Level,
    RequestRows as RequestRows,
    RequestTensors as RequestTensors,
    StaticTree as StaticTree,
    TreeGrower as TreeGrower,
    draws_some as draws_some,
    dynamic_grower_of as dynamic_grower_of,
    grow as grow,
    grower_of as grower_of,
    most_likely_of as most_likely_of,
)
from specdec_core.drafting.losses import (
    accuracy as accuracy,
    soft_cross_entropy as soft_cross_entropy,
    token_loss as token_loss,
)
from specdec_core.drafting.merging import merge_drafts as merge_drafts
from specdec_core.drafting.unrolling import SlotAttention as SlotAttention, step_weight as step_weight, unroll as unroll
from specdec_core.drafting.vocabulary import (
    DraftVocabulary as DraftVocabulary,
    checked_token_map as checked_token_map,
    most_frequent as most_frequent,
)
from specdec_core.engine.draft_kind import explain_draft_kind as explain_draft_kind
from specdec_core.engine.engine import Engine as Engine
from specdec_core.engine.histogram import Histogram as Histogram
from specdec_core.engine.metrics import (
    Counter as Counter,
    DraftCounts as DraftCounts,
    Gauge as Gauge,
    Vector as Vector,
)
from specdec_core.engine.request import Piece as Piece, Request as Request
from specdec_core.errors import (
    CapacityError as CapacityError,
    CompatibilityError as CompatibilityError,
    ConfigError as ConfigError,
    DeviceError as DeviceError,
    PluginError as PluginError,
    SpecdecError as SpecdecError,
)
from specdec_core.kv import BlockPool as BlockPool, PagedKVManager as PagedKVManager
from specdec_core.models.checkpoint import (
    Checkpoint as Checkpoint,
    check_target_sizes as check_target_sizes,
    config_value as config_value,
)
from specdec_core.models.decoder_stack import DecoderStack as DecoderStack
from specdec_core.models.decoder_trial import record_layer as record_layer
from specdec_core.models.embedded import resolve_model as resolve_model
from specdec_core.models.graph_memory import head_graph_bytes as head_graph_bytes
from specdec_core.models.meta_load import Outline as Outline, outline_draft as outline_draft
from specdec_core.models.model import register_tap as register_tap
from specdec_core.models.save import save_head as save_head
from specdec_core.models.training import load_training_target as load_training_target
from specdec_core.ops.compiling import compiled as compiled
from specdec_core.ops.decoder import DecoderLayer as DecoderLayer, Linears as Linears, Norm as Norm
from specdec_core.ops.upload import upload as upload
from specdec_core.plugins import PluginInfo as PluginInfo, Plugins as Plugins, PluginWarning as PluginWarning
from specdec_core.sampling.logprobs import Logprob as Logprob
from specdec_core.verifiers.accepted_and_bonus import follow as follow, trace as trace

__version__: str
