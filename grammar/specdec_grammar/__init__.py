"""The specdec plugin for structured output: it offers the grammar compiler `llguidance`."""

from collections.abc import Sequence

from specdec_core import GrammarCompiler, GrammarContext, GrammarSpec, hookimpl


def build(context: GrammarContext) -> GrammarCompiler:
    from specdec_grammar.compiler import Compiler

    return Compiler(context)


@hookimpl
def specdec_grammars() -> Sequence[GrammarSpec]:
    return [GrammarSpec(name="llguidance", build=build, api=1)]
