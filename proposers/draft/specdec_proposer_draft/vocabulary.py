"""Whether two models mean the same by their token ids."""

from __future__ import annotations

from specdec_core import CompatibilityError, ConfigError, EngineConfig, TargetInfo, load_tokenizer
from specdec_proposer_draft.config import DraftConfig


def check_vocabulary(config: DraftConfig, draft: TargetInfo, target: TargetInfo) -> None:
    """Raise CompatibilityError unless their tokenizers have the same tokens under the same ids.

    The sizes of their embeddings may differ: those are often padded. Where a tokenizer is missing, they may not.
    """
    of_target = _tokens(EngineConfig(model=target.model))
    of_draft = _tokens(EngineConfig(model=config.model, revision=config.revision, code_revision=config.code_revision))
    if of_target is None or of_draft is None:
        if draft.vocab_size != target.vocab_size:
            raise CompatibilityError(
                f"the draft model {draft.model!r} has {draft.vocab_size} token ids and the target {target.vocab_size}, "
                f"and without both tokenizers nobody can tell whether that is padding: put their files into the "
                f"models' folders, or use a draft model of the target's family"
            )
        return
    if of_draft == of_target:
        return
    differing = sorted(of_target.items() ^ of_draft.items(), key=lambda item: item[1])
    token_id = differing[0][1]
    raise CompatibilityError(
        f"the draft model {draft.model!r} has another vocabulary than the target: {len(differing)} entries differ, the "
        f"first at id {token_id} ({_named(of_target, token_id)} in the target, {_named(of_draft, token_id)} in the "
        f"draft). Use a draft model of the target's family"
    )


def _tokens(config: EngineConfig) -> dict[str, int] | None:
    """{token: id}, or None without a tokenizer."""
    try:
        return dict(load_tokenizer(config).get_vocab())
    except ConfigError:
        return None


def _named(tokens: dict[str, int], token_id: int) -> str:
    return next((repr(token) for token, its_id in tokens.items() if its_id == token_id), "nothing")
