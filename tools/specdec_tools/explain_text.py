"""The report of `spec-decode explain` in a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from specdec_core.cli.screen import counted, printable
from specdec_tools.explained import ACCEPTED, REJECTED, Explanation, Node, Step, Token

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 28
"""Characters for a token and what is drawn before it."""

COLORS = ("green", "blue", "yellow", "magenta", "cyan", "red", "white")
"""Of accepted tokens, by the first method that drafted them, in the order of the colors of the server's front page."""

PARTS = {"drafting": "drafting", "forward_pass": "forward pass", "verification": "verification", "rest": "rest"}
"""What a step's seconds are called."""


NEXT = {"recovered": "recovered token", "bonus": "bonus token", "plain": "target's own token"}
"""What the token after a draft is called, by `Step.next_kind`."""


def print_explanation(console: Console, found: Explanation) -> None:
    def show(*parts: str | tuple[str, str]) -> None:
        console.print(Text.assemble(*parts), overflow="ellipsis", no_wrap=True)

    console.print(
        Text.assemble(
            (printable(found.prompt), "dim"),
            *(
                (printable(piece.text), _style(found, piece.methods) if piece.is_draft else "")
                for piece in found.pieces
            ),
            printable(found.rest),
        )
    )
    for step in found.steps:
        show("")
        show((f"step {step.number}", "bold"), f"  after {_cut(repr(step.root))}, {counted(step.num_tokens, 'token')}")
        show(f"  {summary(step)}")
        show((f"  {seconds(step)}", "dim"))
        draws = any(node.draft_prob is not None for node in step.nodes)
        if step.nodes:
            show(
                (
                    f"  {'token':{WIDTH}} {'target':>8}{'draft':>9}" if draws else f"  {'token':{WIDTH}} {'target':>8}",
                    "dim",
                )
            )
        for drawn, index in lines_of(step):
            node = step.nodes[index]
            style = _style(found, node.methods) if node.state == ACCEPTED else "" if node.state == REJECTED else "dim"
            draft = "" if node.draft_prob is None else percent(node.draft_prob)
            methods = " and ".join(node.methods) if len(found.methods) > 1 else ""
            show(
                (
                    _row(drawn + repr(node.text), node, f"{draft:>8}" if draws else "", f"{node.state:12} {methods}"),
                    style,
                )
            )
        if (token := step.next_token) is not None:
            show(_row(repr(token.text), token, " " * 8 * draws, NEXT[step.next_kind]))
            if not token.is_likeliest:
                show(("  likelier there: " + likeliest(step), "dim"))
    show("")
    for line in _totals(found):
        show(line)


def summary(step: Step) -> str:
    """What a step did, in a few words."""
    if step.is_prefill:
        return "the prompt is read"
    if not step.nodes:
        return "nothing was drafted"
    return f"{step.num_accepted} of {counted(len(step.nodes), 'draft token')} accepted (verifier {step.verifier})"


def seconds(step: Step) -> str:
    """Where a step's time went."""
    return ", ".join(f"{name} {1000 * step.seconds[part]:.1f} ms" for part, name in PARTS.items())


def likeliest(step: Step) -> str:
    """The target's likeliest tokens after the accepted ones."""
    return ", ".join(f"{token.text!r} {percent(token.target_prob)}" for token in step.likeliest)


def percent(prob: float) -> str:
    """A probability in percent. What is rounded to 0 or 100 but is not is told apart."""
    if 0 < prob < 0.0005:
        return "< 0.1 %"
    return "> 99.9 %" if 0.9995 <= prob < 1 else f"{100 * prob:.1f} %"


def marked(token: Node | Token) -> str:
    """The target's probability of a token in percent, followed by "*" if no other is likelier there, or by a space."""
    return percent(token.target_prob) + ("*" if token.is_likeliest else " ")


def lines_of(step: Step) -> Iterator[tuple[str, int]]:
    """Yield the nodes from the root down, as (what is drawn before the token, index). An only child is drawn below its
    parent; children of which there are several branch off."""

    def below(parent: int, before: str) -> Iterator[tuple[str, int]]:
        children = step.children(parent)
        for number, child in enumerate(children, start=1):
            if len(children) == 1:
                yield before, child
                yield from below(child, before)
            else:
                is_last = number == len(children)
                yield before + ("└ " if is_last else "├ "), child
                yield from below(child, before + ("  " if is_last else "│ "))

    yield from below(-1, "")


def _row(text: str, token: Node | Token, draft: str, rest: str) -> str:
    return f"  {_cut(text):{WIDTH}} {marked(token):>9}{draft}  {rest}".rstrip()


def _cut(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"


def _style(found: Explanation, methods: tuple[str, ...]) -> str:
    return f"bold {COLORS[color_of(found, methods)]}"


def color_of(found: Explanation, methods: tuple[str, ...]) -> int:
    """The number of the color of a token that these methods have drafted."""
    return found.methods.index(methods[0]) % len(COLORS) if methods else 0


def _totals(found: Explanation) -> Iterator[str]:
    totals = found.totals
    length = "" if totals["acceptance_length"] is None else f", acceptance length {totals['acceptance_length']:.2f}"
    yield (
        f"{counted(len(found.pieces), 'token')} in {counted(totals['num_steps'], 'step')}: "
        f"{totals['num_accepted']} of {counted(totals['num_draft_tokens'], 'draft token')} accepted{length}"
    )
    if len(found.methods) > 1:
        counts = [f"{method} {accepted} of {drafted}" for method, (drafted, accepted) in found.by_method.items()]
        yield f"accepted by method: {', '.join(counts)}"
    whole = sum(totals["seconds"].values())
    shares = [f"{name} {100 * totals['seconds'][part] / whole:.0f} %" for part, name in PARTS.items()]
    yield f"{whole:.3f} s: {', '.join(shares)}"
    yield "*: the target's likeliest token in its place"
