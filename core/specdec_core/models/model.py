"""A causal LM as the engine runs it: takes a flat batch of tokens, and returns logits of chosen tokens and hidden
states of chosen layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import nn
from torch.utils.hooks import RemovableHandle

from specdec_core.config.fields import shown
from specdec_core.contracts.kv import KVLayout, KVMetadata, StateLayout, Visibility
from specdec_core.contracts.proposer import Plan
from specdec_core.contracts.target import TargetInfo
from specdec_core.errors import CompatibilityError, ConfigError, PluginError
from specdec_core.kv.states import StateStore
from specdec_core.models.attention import PagedAttention, ProbeSite, probe
from specdec_core.models.compatibility import refusing_failures, try_out
from specdec_core.models.decoder import Decoder, RecordedDecoder
from specdec_core.models.decoder_stack import DecoderStack
from specdec_core.models.decoder_trial import record_decoder
from specdec_core.models.embedding_and_head import EmbeddingAndHead, raw_logits, record_embedding_and_head, table_rows
from specdec_core.models.families import check_length
from specdec_core.models.fused_ops import replace_parts
from specdec_core.models.graphed import ForwardGraphs
from specdec_core.models.load import ModelSource, load_config, parse_dtype
from specdec_core.models.mixers import adopt_mixers
from specdec_core.models.packed_linear import PackedLinear, pack_linears, recording_shared_inputs
from specdec_core.models.recurrent import RecurrentLayers, StatePlan
from specdec_core.models.rope import pin_positions
from specdec_core.models.split import connect
from specdec_core.models.split_load import load_part, plan_split
from specdec_core.models.split_modules import Part
from specdec_core.models.weight_bytes import weight_bytes
from specdec_core.models.weights import load_weights
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_core.ops.padding import padded_to

logger = logging.getLogger(__name__)


class Model:
    """A causal LM from transformers, run on the paged KV cache: the target, or a draft model.

    Public attributes: info (TargetInfo), kv_groups (KVGroups of its layers), eos_token_ids (frozenset of int),
    attention (PagedAttention), decoder (Decoder, None if the layers are not fused) and recurrent (RecurrentLayers, None
    if no layer keeps a state), all three set by `attach`; graphs (ForwardGraphs, None if there are none); weight_bytes
    (of this rank's part, None if the model is whole).

    part: the part of the model that this rank holds; None: all of it. All ranks make the model, and call its methods,
        at the same time and with the same arguments. Such a model is neither fused nor has it graphs.
    """

    def __init__(self, source: ModelSource, part: Part | None = None) -> None:
        config = load_config(source)
        self.info = target_info_of(source, config)
        self.weight_bytes: int | None = None
        split = None
        if part is None:
            self._model = load_weights(source, config)
        else:
            split = plan_split(source, config, self.info, part)
            self._model = load_part(source, config, self.info, split)
            self.weight_bytes = weight_bytes(self._model)
            connect(self._model, split, part)
        text_config = config.get_text_config()
        with torch.inference_mode(), refusing_failures(self._model):
            pin_positions(self._model, self.info.max_model_len)
            adopt_mixers(self._model, text_config)
            with recording_shared_inputs(self._model) as self._linear_groups:
                sites = probe(self._model)
            if split is not None:
                split.check(sites.shapes)
            self.kv_groups = kv_groups_of(sites, text_config.num_hidden_layers, self.info.dtype)
            with record_embedding_and_head(self._model, backbone_of(self._model, sites.layers)) as record:
                self._keeps_rows = try_out(self._model, self.info.vocab_size, self.info.max_model_len).keeps_rows
            self._factors = EmbeddingAndHead.of(record, text_config)
            is_whole = part is None and not sites.mixers
            self._recorded = self._record_decoder(sites.modules) if is_whole else None
        self._attention_modules, self._mixers, self._layer_modules = sites.modules, sites.mixers, sites.layers
        self.decoder: Decoder | None = None
        self._embedding = self._model.get_input_embeddings()
        self.eos_token_ids = _eos_token_ids(self._model.generation_config, text_config)
        self._features: dict[str, torch.Tensor] = {}
        self.recurrent: RecurrentLayers | None = None
        is_eager = source.enforce_eager or part is not None or self.info.device.type != "cuda"
        if sites.mixers and not is_eager:
            is_eager = True
            logger.info("no CUDA graphs: what recurrent layers compute depends on the shapes of drafts")
        self.graphs = None if is_eager else ForwardGraphs(self._run)
        self._output_rows: Callable[[torch.Tensor], torch.Tensor] | None = None

    def attach(
        self,
        attention: PagedAttention,
        ops: Mapping[str, Callable[..., Any]],
        plan: Plan | None = None,
        states: StateStore | None = None,
    ) -> None:
        """Set the model's attention and operations, and register its taps. A tap is a hook that collects hidden states.

        plan: the proposer's, which lists the taps.
        states: stores the states of recurrent layers. None: there are none, else CompatibilityError is raised.
        """
        plan = plan or Plan()
        if states is None:
            self.kv_groups.refuse_states()
        else:
            self.recurrent = RecurrentLayers(self._mixers, states, attention.padded)
        if plan.output_rows:
            self._output_rows = self._factors.rows(self._model.get_output_embeddings())
        self.attention = attention
        self.attention.bind(self._attention_modules)
        for tap in plan.taps:
            self._add_tap(tap)
        packed = pack_linears(self._model, ops["pack_linear"], self._linear_groups)
        self._linear_groups.clear()  # frees the unpacked weights that they hold
        replace_parts(self._model, ops)
        if self._recorded is not None:
            norm = self._model.get_submodule(self._recorded.norm)
            self.decoder = self._recorded.attach(attention, packed, ops["fuse_layers"], norm, plan.taps)
            self._recorded = None  # frees the unpacked weights
            head = self._model.get_output_embeddings()
            if self.decoder is not None and isinstance(head, PackedLinear) and head.is_row_invariant:
                attention.need_no_padded_rows()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: KVMetadata,
        visibility: Visibility,
        rows: torch.Tensor,
        *,
        window: int | None = None,
        states: StatePlan | None = None,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Run one forward pass over a flat batch of tokens.

        token_ids, positions: int64 [num_tokens], padded.
        metadata: block tables and slot mapping of the tokens.
        visibility: the attention mask.
        rows: int64 [num_rows], the indices of the tokens whose logits are needed.
        window: sliding window of all layers, in tokens. A layer whose own window is smaller keeps its own. None: each
            layer has its own window, if any.

        Returns logits [num_rows, vocab] and the taps' hidden states {tap: [num_tokens, width]}.
        """
        num_rows = len(rows)
        rows = padded_to(self.attention.padded(num_rows), rows)
        plan = self.attention.plan_of(metadata, visibility)
        if self.graphs is not None:
            logits, features = self.graphs.forward(token_ids, positions, plan, rows, window)
        elif self.recurrent is not None and states is not None:
            with self.recurrent.using(states):
                logits, features = self._run(token_ids, positions, rows, plan, window)
        else:
            logits, features = self._run(token_ids, positions, rows, plan, window)
        return logits[:num_rows], features

    def _run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        plan: AttentionPlan,
        window: int | None,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        self._features.clear()
        keep = {"logits_to_keep": rows} if self._keeps_rows else {}
        with self.attention.using(plan, window):
            if self.decoder is not None:
                hidden, features = self.decoder.forward(token_ids, positions, rows)
                return self.output_head(hidden), features
            output = self._model(token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **keep)
        logits = output.logits[0] if self._keeps_rows else output.logits[0, rows]
        return logits, dict(self._features)

    def embed(self, token_ids: torch.Tensor, raw: bool = False) -> torch.Tensor:
        """Return the embeddings [n, hidden] of token ids [n], as the first layer gets them. raw: return rows of the
        embedding's weight instead, without the scaling factor of the model's family."""
        return table_rows(self._embedding, token_ids) if raw else self._factors.embed(self._embedding, token_ids)

    def output_head(self, hidden: torch.Tensor, raw: bool = False) -> torch.Tensor:
        """Compute logits [n, vocab] from hidden states [n, hidden] after the final norm. raw: leave out the scaling
        factors and the softcap of the model's family."""
        head = self._model.get_output_embeddings()
        return raw_logits(head, hidden) if raw else self._factors.logits(head, hidden)

    def output_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows [..., hidden] of the LM head's weight for token ids, int64 [...], scaled such that the dot
        product of a row and a hidden state is a logit. Raises PluginError if the proposer's plan does not have
        output_rows=True."""
        if self._output_rows is None:
            raise PluginError("the proposer takes rows of the LM head, but its Plan does not have output_rows=True")
        return self._output_rows(token_ids)

    def _record_decoder(self, attention_modules: Sequence[nn.Module]) -> RecordedDecoder | None:
        layers = _decoder_layers(self._model, attention_modules)
        if layers is None:
            return None
        backbone, longest = backbone_of(self._model, attention_modules), self.info.max_model_len
        return record_decoder(self._model, backbone, layers, attention_modules, self._factors, longest)

    def _add_tap(self, tap: str) -> None:
        def keep(hidden: torch.Tensor) -> None:
            self._features[tap] = hidden[0]

        if tap == "final":
            backbone = backbone_of(self._model, self._layer_modules)
            backbone.register_forward_hook(lambda module, args, out: keep(out.last_hidden_state))
        else:
            layers = _decoder_layers(self._model, self._layer_modules)
            if layers is None:
                raise CompatibilityError(
                    f"features need a list of decoder layers with one attention each, and {type(self._model).__name__} "
                    f"has none: use a method that reads no hidden states, or those of the last layer only"
                )
            register_tap(layers, tap, keep)


def _eos_token_ids(*configs: Any) -> frozenset[int]:
    """Return the end-of-text tokens that the first of these configurations with any states. Raises CompatibilityError
    if they are no token ids."""
    eos = next((each for config in configs if (each := getattr(config, "eos_token_id", None)) is not None), ())
    found = list(eos) if isinstance(eos, list | tuple) else [eos]
    if not all(type(each) is int for each in found):
        raise CompatibilityError(
            f"eos_token_id of the model's generation_config.json or config.json is {shown(eos)}, and should be a token "
            f"id or a list of them: correct it"
        )
    return frozenset(found)


def speed_up(module: nn.Module, ops: Mapping[str, Callable[..., Any]], attention: PagedAttention | None = None) -> None:
    """Optimize a draft head's module in place for inference. Packs the weights of its linear layers, fuses its
    `DecoderStack`s, and replaces its norms and rotary embeddings by the operations of `ops`.

    attention: over the KV cache of the head's layers, if it has any.
    """
    stacks = [each for each in module.modules() if isinstance(each, DecoderStack)] if attention is not None else []
    groups = [group for stack in stacks for group in stack.shared_inputs()]
    joined = {linear for group in groups for linear in group}
    groups += [[each] for each in module.modules() if isinstance(each, nn.Linear) and each not in joined]
    packed = pack_linears(module, ops["pack_linear"], groups)
    if attention is not None:
        for stack in stacks:
            stack.fuse(packed, ops["fuse_layers"], attention)
    replace_parts(module, ops)


def backbone_of(model: nn.Module, sited: Sequence[nn.Module]) -> nn.Module:
    """Return the innermost module that contains all attention modules and recurrent layers (`sited`): the model without
    its LM head. transformers may call this module directly, without calling the modules around it."""
    holder = model
    while True:
        inner = next((child for child in holder.children() if set(sited) <= set(child.modules())), None)
        if inner is None or isinstance(inner, nn.ModuleList | nn.ModuleDict):
            return holder
        holder = inner


def _decoder_layers(model: nn.Module, sited: Sequence[nn.Module]) -> nn.ModuleList | None:
    """Return the list of decoder layers. None: there is no list with one of the attention modules and recurrent layers
    (`sited`) in each entry, such as in LongCat-Flash, whose layers attend twice."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(sited):
            inside = zip(module, sited, strict=True)
            if all(any(child is mixer for child in layer.modules()) for layer, mixer in inside):
                return module
    return None


def register_tap(layers: nn.ModuleList, tap: str, keep: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Register a hook on a decoder layer. In each forward pass, it calls `keep` with hidden states [..., width].

    tap: which hidden states. "input.i" is the input of layer i or, if i is the number of layers, the output of the last
        layer. Raises ConfigError for any other tap.
    """
    kind, _, index = tap.partition(".")
    if kind != "input" or not index.isdigit() or int(index) > len(layers):
        raise ConfigError(f"tap {tap!r} is not known: give 'final' or 'input.i' with i from 0 to {len(layers)}")
    if int(index) == len(layers):
        return layers[-1].register_forward_hook(
            lambda module, args, out: keep(out[0] if isinstance(out, tuple) else out)
        )
    return layers[int(index)].register_forward_pre_hook(
        lambda module, args, kwargs: keep(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )


def target_info_of(source: ModelSource, config: Any) -> TargetInfo:
    """Collect facts about a model, target or draft, before its weights are loaded. config: the model's configuration
    from transformers.

    Raises ConfigError if the source's max_model_len is missing or out of range, CompatibilityError if the model's
    family is not supported at this length.
    """
    text_config = config.get_text_config()
    asked, trained = source.max_model_len, getattr(text_config, "max_position_embeddings", None)
    if asked is None and trained is None:
        raise ConfigError("the model's configuration does not state the length of its context: give max_model_len")
    trained = trained or asked or 1
    if asked is not None and not 2 <= asked <= trained:
        raise ConfigError(f"max_model_len={asked} is out of range: this model allows 2 to {trained} tokens")
    longest = asked or trained
    check_length(text_config, longest)
    return TargetInfo(
        model=source.path,
        model_type=config.model_type,
        vocab_size=text_config.vocab_size,
        hidden_size=text_config.hidden_size,
        num_layers=text_config.num_hidden_layers,
        max_model_len=longest,
        dtype=parse_dtype(source.dtype, source.device),
        device=source.device,
        revision=source.revision,
        trust_remote_code=source.trust_remote_code,
    )


@frozen
class KVGroups:
    """The groups of a model's layers in the KV cache: layers whose keys and values have equal shapes share a group.

    layouts: the KV cache layout of each group.
    places: for each layer that attends, the index of its group and the layer's index in that group.
    states: of the layers that keep a state instead. None: there are none.
    """

    layouts: tuple[KVLayout, ...]
    places: tuple[tuple[int, int], ...]
    states: StateLayout | None = None

    @property
    def only(self) -> KVLayout:
        """The layout of the only group. Raises CompatibilityError if there are several groups, since a draft model may
        have only one, or if layers keep states."""
        self.refuse_states()
        if len(self.layouts) > 1:
            raise CompatibilityError(
                f"a draft model with layers of different key and value shapes is not supported: {self.layouts}"
            )
        return self.layouts[0]

    def refuse_states(self) -> None:
        """Raise CompatibilityError if layers keep states, for a draft model."""
        if self.states is not None:
            raise CompatibilityError(
                f"a draft model with recurrent layers is not supported, and {len(self.states.layers)} of this model's "
                f"layers keep a state: such a model can be a target. Use a draft model whose layers all attend"
            )


def kv_groups_of(sites: ProbeSite, num_layers: int, dtype: torch.dtype) -> KVGroups:
    """Group a model's layers by the shapes of their keys and values.

    sites: the layers, as `probe` found them. Their states have the dtype of the probed model, or float32.
    dtype: of keys and values, and of states that are not in float32.

    Raises CompatibilityError if the number of layers is not num_layers, or if none attends, and ValueError if
    num_layers is 0.
    """
    if not num_layers:
        raise ValueError("num_hidden_layers is 0")
    shapes, found = sites.shapes, len(sites.layers)
    if found != num_layers or not shapes:
        mixers = f", and {len(sites.mixers)} keep a state" if sites.mixers else ""
        raise CompatibilityError(
            f"{len(shapes)} of {num_layers} layers use the common attention function{mixers}: "
            f"{'one must attend at least' if found == num_layers else 'the others would run without a cache'}. Older "
            f"families, and those with linear attention or other states that have no row in models/families.py, are "
            f"not supported"
        )
    kinds = list(dict.fromkeys(shapes))
    places = [(kinds.index(shape), shapes[:layer].count(shape)) for layer, shape in enumerate(shapes)]
    layouts = (KVLayout(shapes.count(shape), *shape, dtype, keeps_nodes=True) for shape in kinds)
    states = [
        tuple(evolve(each, dtype=torch.float32 if each.dtype == torch.float32 else dtype) for each in of_layer)
        for of_layer in sites.states
    ]
    return KVGroups(tuple(layouts), tuple(places), StateLayout(tuple(states)) if states else None)
