"""The mapping between the token ids of a draft model and those of the target."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import frozen

from specdec_core import CompatibilityError, ConfigError, EngineConfig, TargetInfo, load_tokenizer
from specdec_proposer_draft.config import DraftConfig
from specdec_proposer_draft.token_meanings import Meanings

SMALLEST_SHARE = 0.01
"""Smallest share of the target's tokens that the draft model must have. A smaller share is little more than the single
characters, which every vocabulary has and which make up little of a tokenized text."""


@frozen(eq=False)
class SharedVocabulary:
    """The tokens that the draft model and the target have in common, and the mapping between their ids. Only common
    tokens are drafted (TLI: Timor et al. 2025, algorithm 4).

    `stand_in` maps each token of the target to one token of the draft model. So a request has the same number of tokens
    in both models, and both models use the same KV-cache slots. All arrays are on the host.
    """

    stand_in: np.ndarray  # int64 [target_vocab]   the draft's id for each of the target's
    draft_ids: np.ndarray | slice  # int64 [num_shared]   columns of the draft's logits
    target_ids: np.ndarray | None  # int64 [num_shared]   the target's ids of these columns; None: all ids in order

    @classmethod
    def by_id(cls, draft: TargetInfo, target: TargetInfo) -> SharedVocabulary:
        """Return the mapping for models whose token ids mean the same tokens. An id that only one model has is padding
        of its embedding and never occurs in a request, so it does not matter which id replaces it."""
        size = min(draft.vocab_size, target.vocab_size)
        return cls(
            stand_in=np.minimum(np.arange(target.vocab_size), draft.vocab_size - 1),
            draft_ids=slice(size),
            target_ids=np.arange(size) if size < target.vocab_size else None,
        )

    @classmethod
    def by_text(cls, of_draft: Any, of_target: Any, draft: TargetInfo, target: TargetInfo) -> SharedVocabulary:
        """Return the mapping for models with different tokenizers. Tokens with the same text or the same special role,
        such as EOS, are paired.

        of_draft, of_target: the tokenizers of the two models.
        draft, target: the two models.
        """
        its, wanted = Meanings.of(of_draft, draft.vocab_size), Meanings.of(of_target, target.vocab_size)
        pairs = wanted.pairs_with(its)
        stand_in = [its.nearest(wanted.of_id.get(i, ())) for i in range(target.vocab_size)]
        target_ids = sorted(pairs)
        for i in target_ids:
            stand_in[i] = pairs[i]
        return cls(
            stand_in=np.array(stand_in, dtype=np.int64),
            draft_ids=np.array([pairs[i] for i in target_ids], dtype=np.int64),
            target_ids=np.array(target_ids, dtype=np.int64),
        )


def shared_vocabulary(config: DraftConfig, draft: TargetInfo, target: TargetInfo) -> SharedVocabulary:
    """Return the mapping between the token ids of a draft model and those of the target.

    Raises CompatibilityError if the tokenizers differ or, with use_heterogeneous_vocab, have too few tokens in common.

    If a tokenizer cannot be loaded, the token ids are assumed to mean the same tokens in both models. In this case,
    CompatibilityError is raised if the embeddings differ in their number of rows or use_heterogeneous_vocab is set.
    """
    of_draft, of_target = _tokenizers(config, target)
    if of_target is None or of_draft is None:
        _check_without_tokenizers(config, draft, target)
        return SharedVocabulary.by_id(draft, target)
    entries, its_entries = of_target.get_vocab(), of_draft.get_vocab()
    if entries == its_entries:
        return SharedVocabulary.by_id(draft, target)
    vocabulary = SharedVocabulary.by_text(of_draft, of_target, draft, target)
    num_shared = 0 if vocabulary.target_ids is None else len(vocabulary.target_ids)
    has_enough = num_shared >= max(1, SMALLEST_SHARE * len(entries))
    if config.use_heterogeneous_vocab and has_enough:
        return vocabulary
    shared = f"{num_shared} of the target's {len(entries)} tokens stand for the same text in both"
    if config.use_heterogeneous_vocab:
        raise CompatibilityError(
            f"the draft model {draft.model!r} cannot be used with use_heterogeneous_vocab=True: {shared}, and at least "
            f"{SMALLEST_SHARE:.0%} are needed. Use a draft model with a tokenizer more like the target's"
        )
    differing = sorted(entries.items() ^ its_entries.items(), key=lambda item: item[1])
    token_id = differing[0][1]
    raise CompatibilityError(
        f"the draft model {draft.model!r} has another vocabulary than the target: {len(differing)} entries differ, the "
        f"first at id {token_id} ({_token_name(entries, token_id)} in the target, "
        f"{_token_name(its_entries, token_id)} in the draft). Use a draft model of the target's family"
        + (f", or give use_heterogeneous_vocab=True to draft the shared tokens: {shared}" if has_enough else "")
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
            f"and without both tokenizers it is unknown whether the rest is padding: {remedy}"
        )


def _tokenizers(config: DraftConfig, target: TargetInfo) -> tuple[Any, Any]:
    """Return the draft model's tokenizer and the target's. Each is None if it cannot be loaded."""
    is_trusted = target.trust_remote_code
    of_draft = EngineConfig(
        model=config.model,
        revision=config.revision,
        code_revision=config.code_revision,
        trust_remote_code=is_trusted,
    )
    of_target = target.tokenizer
    if of_target is None:  # the engine runs without a tokenizer
        of_target = _tokenizer(EngineConfig(model=target.model, revision=target.revision, trust_remote_code=is_trusted))
    return _tokenizer(of_draft), of_target


def _tokenizer(config: EngineConfig) -> Any:
    try:
        return load_tokenizer(config)
    except ConfigError:
        return None


def _token_name(tokens: dict[str, int], token_id: int) -> str:
    return next((repr(token) for token, its_id in tokens.items() if its_id == token_id), "nothing")
