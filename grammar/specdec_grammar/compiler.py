"""Compiles structured_outputs with the library llguidance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from specdec_core import ConfigError, GrammarContext, StructuredOutputs, shown

MOST_KEPT = 32
"""Compiled grammars that are kept for later requests. Compiling takes milliseconds, with a large schema a second."""


class Compiler:
    """Compiles grammars for one tokenizer. Raises ConfigError unless that is a fast one of transformers."""

    def __init__(self, context: GrammarContext) -> None:
        self._tokenizer = _read(context)
        self._compiled = lru_cache(MOST_KEPT)(self._compile)

    def compile(self, wanted: StructuredOutputs) -> Matcher:
        return Matcher(self._compiled(wanted).deep_copy())

    def _compile(self, wanted: StructuredOutputs) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokenizer, _grammar(wanted), log_level=0)
            matcher.compute_bitmask()  # fails if nothing matches the grammar
            fault = _error(matcher)
        except ValueError as error:  # text that is no JSON
            fault = str(error)
        if fault:
            given = f"{wanted.kind}={shown(getattr(wanted, wanted.kind))}"
            raise ConfigError(f"structured_outputs has {given}, which cannot be compiled: {fault.strip()}")
        return matcher


class Matcher:
    """A `GrammarMatcher` over a matcher of llguidance. Its methods raise RuntimeError once that has failed, as where a
    grammar exceeds a limit of llguidance."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_ids: Sequence[int]) -> int:
        num_accepted: int = self._matcher.try_consume_tokens(list(token_ids))
        self._check()
        return num_accepted

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        self._check()

    def fill(self, mask: np.ndarray) -> None:
        # A tokenizer may have tokens that the target's logits lack.
        mask[:] = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[: len(mask)]
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RuntimeError(_error(self._matcher))


def _error(matcher: LLMatcher) -> str:
    """What is wrong with a matcher, without the dump of its state; "" if nothing is."""
    return str(matcher.get_error()).partition("\n<state>")[0]


def _read(context: GrammarContext) -> LLTokenizer:
    size = max(context.vocab_size, len(context.tokenizer))
    try:
        return from_tokenizer(context.tokenizer, n_vocab=size, eos_token=list(context.eos_token_ids))
    except Exception as error:
        raise ConfigError(
            f"structured_outputs need a fast tokenizer of transformers that llguidance can read, and it cannot read "
            f"this {type(context.tokenizer).__name__}: {error}"
        ) from error


def _grammar(wanted: StructuredOutputs) -> str:
    """A grammar as LLMatcher takes it. Raises ValueError for a schema that is no JSON."""
    if wanted.regex is not None:
        return str(LLMatcher.grammar_from_regex(wanted.regex))
    if wanted.grammar is not None:
        return str(LLMatcher.grammar_from_lark(wanted.grammar))
    if wanted.choice is not None:
        return str(LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quoted, wanted.choice))))
    schema = '{"type": "object"}' if wanted.json is None else wanted.json
    overrides = {"whitespace_flexible": False} if wanted.disable_any_whitespace else None
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=overrides))


def _quoted(text: str) -> str:
    return json.dumps(text)  # all but ASCII is escaped
