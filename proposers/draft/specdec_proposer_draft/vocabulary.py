"""How the token ids of a draft model stand for the target's."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen

from specdec_core import CompatibilityError, ConfigError, EngineConfig, TargetInfo, load_tokenizer
from specdec_proposer_draft.config import DraftConfig
from specdec_proposer_draft.token_meanings import Meanings

SMALLEST_SHARE = 0.01
"""Of the target's tokens that the draft must have: fewer are little more than the single characters, which are in every
vocabulary and which hardly a text is made of."""


@frozen(eq=False)
class SharedVocabulary:
    """The tokens that both models have, which are the draft's to choose from (TLI: Timor et al. 2025, algorithm 4), and
    a token of the draft's for each of the target's, so that both have as many and share the places in the cache."""

    stand_in: torch.Tensor  # int64 [target_vocab]   the draft's id for each of the target's
    draft_ids: torch.Tensor | slice  # int64 [num_shared]   columns of the draft's logits
    target_ids: torch.Tensor | None  # int64 [num_shared]   what these are to the target; None: all its ids in order

    @classmethod
    def by_id(cls, draft: TargetInfo, target: TargetInfo) -> SharedVocabulary:
        """Of models that mean the same by their ids. What only one of them has is padding: any token stands for it."""
        device, size = target.device, min(draft.vocab_size, target.vocab_size)
        return cls(
            stand_in=torch.arange(target.vocab_size, device=device).clamp(max=draft.vocab_size - 1),
            draft_ids=slice(size),
            target_ids=torch.arange(size, device=device) if size < target.vocab_size else None,
        )

    @classmethod
    def by_text(cls, of_draft: Any, of_target: Any, draft: TargetInfo, target: TargetInfo) -> SharedVocabulary:
        """Of any two models, by their tokenizers."""
        its, wanted = Meanings.of(of_draft, draft.vocab_size), Meanings.of(of_target, target.vocab_size)
        pairs = wanted.pairs_with(its)
        stand_in = [its.nearest(wanted.of_id.get(i, ())) for i in range(target.vocab_size)]
        target_ids = sorted(pairs)
        for i in target_ids:
            stand_in[i] = pairs[i]
        device = target.device
        return cls(
            stand_in=torch.tensor(stand_in, device=device),
            draft_ids=torch.tensor([pairs[i] for i in target_ids], dtype=torch.int64, device=device),
            target_ids=torch.tensor(target_ids, dtype=torch.int64, device=device),
        )


def shared_vocabulary(config: DraftConfig, draft: TargetInfo, target: TargetInfo) -> SharedVocabulary:
    """Of models that `check_vocabulary` has accepted."""
    if config.use_heterogeneous_vocab:
        of_draft, of_target = _tokenizers(config, target)
        if of_draft.get_vocab() != of_target.get_vocab():
            return SharedVocabulary.by_text(of_draft, of_target, draft, target)
    return SharedVocabulary.by_id(draft, target)


def check_vocabulary(config: DraftConfig, draft: TargetInfo, target: TargetInfo) -> None:
    """Raise CompatibilityError unless their tokenizers have the same tokens under the same ids, or if they need not,
    enough tokens in common.

    The sizes of their embeddings may differ: those are often padded. Where a tokenizer is missing, they may not.
    """
    of_draft, of_target = _tokenizers(config, target)
    if of_target is None or of_draft is None:
        _check_without_tokenizers(config, draft, target)
        return
    entries, its_entries = of_target.get_vocab(), of_draft.get_vocab()
    if entries == its_entries:
        return
    its, wanted = Meanings.of(of_draft, draft.vocab_size), Meanings.of(of_target, target.vocab_size)
    num_shared = len(wanted.pairs_with(its))
    has_enough = num_shared >= max(1, SMALLEST_SHARE * len(entries))
    if config.use_heterogeneous_vocab and has_enough:
        return
    shared = f"{num_shared} of the target's {len(entries)} tokens stand for the same text in both"
    if config.use_heterogeneous_vocab:
        raise CompatibilityError(
            f"the draft model {draft.model!r} cannot draft by use_heterogeneous_vocab=True: {shared}, and fewer than "
            f"{SMALLEST_SHARE:.0%} are no use. Use a draft model with a tokenizer more like the target's"
        )
    differing = sorted(entries.items() ^ its_entries.items(), key=lambda item: item[1])
    token_id = differing[0][1]
    raise CompatibilityError(
        f"the draft model {draft.model!r} has another vocabulary than the target: {len(differing)} entries differ, the "
        f"first at id {token_id} ({_named(entries, token_id)} in the target, {_named(its_entries, token_id)} in the "
        f"draft). Use a draft model of the target's family"
        + (
            f", or give use_heterogeneous_vocab=True to draft by the tokens that are shared: {shared}"
            if has_enough
            else ""
        )
    )


def _check_without_tokenizers(config: DraftConfig, draft: TargetInfo, target: TargetInfo) -> None:
    remedy = "put their files into the models' folders, or use a draft model of the target's family"
    if config.use_heterogeneous_vocab:
        raise CompatibilityError(
            f"use_heterogeneous_vocab=True compares the texts of tokens, but the tokenizers of the target and of the "
            f"draft model {draft.model!r} cannot both be loaded: {remedy}"
        )
    if draft.vocab_size != target.vocab_size:
        raise CompatibilityError(
            f"the draft model {draft.model!r} has {draft.vocab_size} token ids and the target {target.vocab_size}, "
            f"and without both tokenizers nobody can tell whether that is padding: {remedy}"
        )


def _tokenizers(config: DraftConfig, target: TargetInfo) -> tuple[Any, Any]:
    """The draft's and the target's; None for one that there is not."""
    is_trusted = target.trust_remote_code
    of_draft = EngineConfig(
        model=config.model,
        revision=config.revision,
        code_revision=config.code_revision,
        trust_remote_code=is_trusted,
    )
    of_target = target.tokenizer
    if of_target is None:  # the engine does without
        of_target = _tokenizer(EngineConfig(model=target.model, trust_remote_code=is_trusted))
    return _tokenizer(of_draft), of_target


def _tokenizer(config: EngineConfig) -> Any:
    try:
        return load_tokenizer(config)
    except ConfigError:
        return None


def _named(tokens: dict[str, int], token_id: int) -> str:
    return next((repr(token) for token, its_id in tokens.items() if its_id == token_id), "nothing")
