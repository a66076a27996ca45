"""How a plugin constrains outputs by grammars (structured output): it compiles a grammar to a matcher, which says after
any tokens which tokens may come next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from specdec_core.config.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    import numpy as np


class GrammarMatcher(Protocol):
    """How far one completion has come in its grammar: what may follow the tokens that it has accepted, at first none.

    What it allows depends on these tokens alone, not on how the matcher came to them: drafts make the engine go forward
    and back. A method that raises makes the request fail, if verification accepts the tokens up to there; the engine
    then makes another matcher.
    """

    def accept(self, token_ids: Sequence[int]) -> int:
        """Go forward by the first of these tokens, up to one that the grammar does not allow. Returns how many these
        are. Whether an end-of-sequence token is among them does not matter: nothing follows it."""

    def rollback(self, num_tokens: int) -> None:
        """Go back by this many of the tokens that were accepted."""

    def fill(self, mask: np.ndarray) -> None:
        """Write which tokens may come next. At least one may: once the grammar is complete, an end-of-sequence token.

        mask: int32 [ceil(vocab_size / 32)], contiguous. Bit i % 32 of word i // 32 says whether token i may come.
        """


class GrammarCompiler(Protocol):
    """Compiles grammars for one vocabulary."""

    def compile(self, wanted: StructuredOutputs) -> GrammarMatcher:
        """Return a new matcher, at the beginning of the grammar. Raises ConfigError if the grammar is wrong.

        Several threads may call this at once: a server compiles a grammar before the engine asks for it, so a compiler
        should keep what it has compiled.
        """


@frozen
class GrammarContext:
    """The vocabulary that grammars are compiled for.

    tokenizer: of transformers.
    vocab_size: the target's. Where the tokenizer has fewer tokens, the others are padding, which no grammar allows.
    eos_token_ids: end-of-sequence tokens, at least one, in ascending order.
    """

    tokenizer: Any
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@frozen(eq=False)
class GrammarSpec:
    """Describes a compiler of grammars to the engine; returned by the hook `specdec_grammars` before any heavy import.

    build: called once, when a request first asks for structured output. Raises ConfigError if it cannot work with the
        tokenizer. Heavy imports belong here.
    api: the version of the plugin API that the plugin is written for (PLUGIN_API).
    """

    name: str
    build: Callable[[GrammarContext], GrammarCompiler]
    api: int
