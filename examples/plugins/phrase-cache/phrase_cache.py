"""Drafts the rest of a phrase that the user has listed, as soon as two of its tokens are in the text."""

from attrs import NOTHING, frozen

from specdec_core import Draft, Plan, Proposer, ProposerSpec, hookimpl, must, option


def is_list_of_phrases(given):
    return isinstance(given, list) and all(isinstance(each, str | list) and each for each in given)


@frozen
class PhraseCacheConfig:
    phrase_cache_phrases: list = option(
        must(is_list_of_phrases, "must be a list of phrases, each a text or a list of token ids", "a list of phrases"),
        "Phrases to complete. Begin a text with a space if one comes before it.",
        default=NOTHING,
    )


class PhraseCache(Proposer):
    def __init__(self, config, context):
        self.device, self.rests = context.device, {}  # {two tokens: those after them}
        for phrase in config.phrase_cache_phrases:
            is_text = isinstance(phrase, str)
            token_ids = context.target.tokenizer.encode(phrase, add_special_tokens=False) if is_text else phrase
            for end in range(2, len(token_ids)):
                self.rests.setdefault(tuple(token_ids[end - 2 : end]), token_ids[end:])

    def propose(self, batch):
        lasts = [tuple(request.token_ids[-2:].tolist()) for request in batch.requests]
        pairs = zip(lasts, batch.max_draft_tokens, strict=True)
        return Draft.from_chains([self.rests.get(last, [])[:most] for last, most in pairs], self.device)


@hookimpl
def specdec_proposers():
    spec = {"name": "phrase_cache", "config": PhraseCacheConfig, "build": PhraseCache, "api": 1}
    return [ProposerSpec(**spec, plan=lambda *_: Plan(observes=False), num_speculative_tokens=lambda *_: 8)]
