"""Makes the grammars of requests for structured output, with the compiler of a plugin."""

from __future__ import annotations

from functools import partial
from threading import Lock
from typing import Any

from specdec_core.config.structured_outputs import StructuredOutputs
from specdec_core.contracts.grammar import GrammarCompiler, GrammarContext, GrammarMatcher
from specdec_core.contracts.target import TargetInfo
from specdec_core.engine.plugin_errors import blaming, building
from specdec_core.errors import ConfigError, SpecdecError
from specdec_core.plugins import Plugins
from specdec_core.sampling.grammar_state import GrammarState


class Grammars:
    """Finds and builds the compiler when a request first asks for structured output.

    tokenizer: None: such requests are refused.
    """

    def __init__(self, plugins: Plugins, tokenizer: Any, target: TargetInfo, eos_token_ids: frozenset[int]) -> None:
        self._plugins, self._tokenizer = plugins, tokenizer
        self._vocab_size = target.vocab_size
        self._eos_token_ids = tuple(sorted(each for each in eos_token_ids if 0 <= each < target.vocab_size))
        self._lock = Lock()  # of _built
        self._built: tuple[str, GrammarCompiler] | None = None

    def start(self, wanted: StructuredOutputs) -> GrammarState:
        """Return a grammar's state before the first token. Raises ConfigError if the grammar is wrong, no plugin can
        compile it, or the engine lacks a tokenizer or the target an end-of-sequence token."""
        return GrammarState(partial(self._compile, wanted), self._vocab_size)

    def compile_ahead(self, wanted: StructuredOutputs) -> None:
        """Compile a grammar, so that `start` finds it compiled if the plugin keeps it. Any thread may call this. Raises
        ConfigError as `start` does."""
        self._compile(wanted)

    def _compile(self, wanted: StructuredOutputs) -> GrammarMatcher:
        with self._lock:
            name, compiler = self._built = self._built or self._build()
        with blaming(f"grammar {name!r}", "failed to compile", passing=(SpecdecError,)):
            return compiler.compile(wanted)

    def _build(self) -> tuple[str, GrammarCompiler]:
        if self._tokenizer is None:
            raise ConfigError("structured_outputs need a tokenizer: leave out skip_tokenizer_init=True")
        if not self._eos_token_ids:
            raise ConfigError("structured_outputs need a model with an end-of-sequence token, and this one names none")
        try:
            spec = self._plugins.grammar()
        except ConfigError as error:
            raise ConfigError(f"structured_outputs need a plugin that compiles them: {error}") from error
        with building(f"grammar {spec.name!r}", "be built"):
            return spec.name, spec.build(GrammarContext(self._tokenizer, self._vocab_size, self._eos_token_ids))
