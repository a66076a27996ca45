"""Tokens that a grammar leaves no choice about: they become output without a forward pass of their own."""

from __future__ import annotations

from specdec_core.engine.request import Request


def forced_tokens(request: Request) -> list[int]:
    """Return the tokens that have to follow a request's output, since its grammar (structured_outputs) allows no other
    token there: braces and names of a JSON schema, or the end. Empty where anything else decides, too.

    After the masks, such a token has probability 1. So the output is the one that forward passes would give, in the
    next of which these tokens are computed with the others that are known.
    """
    constraints, params = request.constraints, request.params
    if constraints is None or constraints.grammar is None or constraints.fault is not None:
        return []
    if params.logprobs is not None or params.logits_processors or constraints.bad_words:
        return []
    if constraints.allowed_ids is not None or request.num_output_tokens < constraints.min_tokens:
        return []
    output = request.token_ids[request.num_prompt_tokens :]
    return constraints.grammar.forced(output, request.max_total_tokens - request.num_tokens)
