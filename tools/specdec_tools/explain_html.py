"""The report of `spec-decode explain` as one HTML file, which loads nothing and runs no script."""

from __future__ import annotations

import hashlib
import html as entities
import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from importlib.resources import files
from string import Template
from typing import Any

from specdec_core.cli.screen import counted, printable
from specdec_tools.explain_text import NEXT, PARTS, color_of, lines_of, marked, percent, seconds, summary
from specdec_tools.explained import ACCEPTED, REJECTED, Explanation, Step

ROW, LANE = 28, 16
"""Pixels: the height of a node's row, and how far children are drawn to the right of their parent."""

KINDS = {ACCEPTED: "accepted", REJECTED: "rejected"}
"""The classes of rows by the states of nodes. Others are "away"."""


def html_of(found: Explanation) -> str:
    """A whole file. All text in it is escaped."""
    template = files("specdec_tools").joinpath("explain.html").read_text(encoding="utf-8")
    (style,) = re.findall(r"<style>(.*?)</style>", template, re.DOTALL)
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    parts = {
        "model": _escaped(found.about["model"]),
        "body": "\n".join(_body(found)),
        "style_hash": f"'sha256-{digest}'",
    }
    return Template(template).substitute(parts)


def _body(found: Explanation) -> Iterator[str]:
    about = {name: value for name, value in found.about.items() if value is not None}
    yield _figures({name: value if isinstance(value, str) else json.dumps(value) for name, value in about.items()})
    yield _text(found)
    yield _legend(found)
    yield from _totals(found)
    yield "<h2>Steps</h2>"
    yield (
        '<p class="faint">A row is a node of the draft tree, below its parent. The percentages are the probabilities '
        "that verification used, of the token after its parent; at temperature 0 they are those of temperature 1. "
        "*: the target's likeliest token there.</p>"
    )
    first = next((step.number for step in found.steps if step.nodes), None)
    for step in found.steps:
        yield from _step(found, step, is_open=step.number == first)


def _figures(values: Mapping[str, Any]) -> str:
    pairs = (f"<div><dt>{_escaped(name)}</dt><dd>{_escaped(str(value))}</dd></div>" for name, value in values.items())
    return f"<dl>{''.join(pairs)}</dl>"


def _text(found: Explanation) -> str:
    pieces = [
        _mark(found, piece.methods, _escaped(piece.text)) if piece.is_draft else _escaped(piece.text)
        for piece in found.pieces
    ]
    text = f'<span class="faint">{_escaped(found.prompt)}</span>{"".join(pieces)}{_escaped(found.rest)}'
    return f'<pre tabindex="0" role="region" aria-label="Prompt and output">{text}</pre>'


def _mark(found: Explanation, methods: tuple[str, ...], content: str) -> str:
    title = f"drafted by {' and '.join(methods) or 'one of the methods'}"
    return f'<mark class="of-{color_of(found, methods)}" title="{_escaped(title)}">{content}</mark>'


def _legend(found: Explanation) -> str:
    if not found.methods:
        return ""
    items = (
        f"<li>{_mark(found, (method,), _escaped(f'drafted by {method}'))} {accepted} of {drafted} accepted</li>"
        for method, (drafted, accepted) in found.by_method.items()
    )
    return (
        f'<ul class="legend" aria-label="Accepted draft tokens, by the method that drafted them">{"".join(items)}</ul>'
    )


def _totals(found: Explanation) -> Iterator[str]:
    totals = found.totals
    figures: dict[str, Any] = {"tokens": len(found.pieces), "steps": totals["num_steps"]}
    if totals["num_drafts"]:
        figures |= {
            "draft tokens": totals["num_draft_tokens"],
            "accepted": totals["num_accepted"],
            "acceptance length": f"{totals['acceptance_length']:.2f}",
        }
    yield _figures(figures)
    whole = sum(totals["seconds"].values())
    yield _time(totals["seconds"], whole)
    keys = (
        f'<li><svg width="10" height="10" aria-hidden="true"><rect width="10" height="10" class="part-{number}"/></svg>'
        f"{name} {100 * totals['seconds'][part] / whole:.0f} %</li>"
        for number, (part, name) in enumerate(PARTS.items())
    )
    yield f'<ul class="legend keys" aria-label="Where the time of all steps went">{"".join(keys)}</ul>'


def _time(spent: Mapping[str, float], whole: float) -> str:
    """Draw where time went. whole: the seconds of the bar's width."""
    rects, x = [], 0.0
    for number, part in enumerate(PARTS):
        width = 100 * spent[part] / whole
        rects.append(f'<rect x="{x:.2f}" width="{width:.2f}" height="1" class="part-{number}"/>')
        x += width
    return f'<svg class="time" viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">{"".join(rects)}</svg>'


def _step(found: Explanation, step: Step, *, is_open: bool) -> Iterator[str]:
    yield f'<details id="step-{step.number}"{" open" if is_open else ""}>'
    text = f"after <code>{_shown(step.root)}</code>, {counted(step.num_tokens, 'token')}: {_escaped(summary(step))}"
    yield f"<summary><b>Step {step.number}</b>{text}</summary>"
    yield '<div tabindex="0" role="region" aria-label="Tree and times"><table>'
    yield from _rows(found, step)
    yield "</table>"
    if step.next_token is not None:
        tokens = ", ".join(f"<code>{_shown(each.text)}</code> {percent(each.target_prob)}" for each in step.likeliest)
        yield f'<p class="faint">Likeliest for the target after the accepted tokens: {tokens}.</p>'
    yield _time(step.seconds, step.total_s)
    yield f'<span class="faint">{seconds(step)}</span></div></details>'


def _rows(found: Explanation, step: Step) -> Iterator[str]:
    """A table with a row for the root, for each node, and for the token that follows."""
    draws, several = any(node.draft_prob is not None for node in step.nodes), len(found.methods) > 1

    def row(kind: str, token: str, target: str, draft: str, outcome: str, methods: str, tag: str = "td") -> str:
        cells = [("token", f"<div>{token}</div>"), ("number", target), *[("number", draft)] * draws, ("state", outcome)]
        cells += [("methods", methods)] * several
        scope = ' scope="col"' if tag == "th" else ""
        shown = (f'<{tag}{scope} class="{name}">{cell}</{tag}>' for name, cell in cells)
        return f'<tr class="{kind}">{"".join(shown)}</tr>'

    yield row("names", "token", "target", "draft", "outcome", "by", tag="th")
    if step.nodes:
        lanes = _lanes("", is_root=True, has_children=True, kind="accepted")
        yield row("root", f"{lanes}<code>{_shown(step.root)}</code>", "", "", "root", "")
    for drawn, index in lines_of(step):
        node = step.nodes[index]
        kind = KINDS.get(node.state, "away")
        lanes = _lanes(drawn, is_root=False, has_children=bool(step.children(index)), kind=kind)
        code = f"<code>{_shown(node.text)}</code>"
        token = _mark(found, node.methods, code) if node.state == ACCEPTED else code
        draft = "" if node.draft_prob is None else percent(node.draft_prob)
        yield row(kind, lanes + token, marked(node), draft, node.state, _escaped(" and ".join(node.methods)))
    if (following := step.next_token) is not None:
        yield row("next", f"<code>{_shown(following.text)}</code>", marked(following), "", NEXT[step.next_kind], "")


def _lanes(drawn: str, *, is_root: bool, has_children: bool, kind: str) -> str:
    """Draw the part of the tree in one row. drawn: as `lines_of` yields it, two characters for each level.

    kind: the class of the node's dot.
    """
    middle, x = ROW // 2, len(drawn) // 2 * LANE + LANE // 2
    path = []
    for lane in range(len(drawn) // 2):
        glyph, at = drawn[2 * lane], lane * LANE + LANE // 2
        if glyph in "├│":
            path.append(f"M{at} 0V{ROW}")
        if glyph == "└":
            path.append(f"M{at} 0V{middle}")
        if glyph in "├└":
            path.append(f"M{at} {middle}H{x}")
    branches = drawn[-2:-1] in ("├", "└")
    if not is_root and not branches:
        path.append(f"M{x} 0V{middle}")
    if has_children:
        path.append(f"M{x} {middle}V{ROW}")
    dot = f'<circle cx="{x}" cy="{middle}" r="4" class="dot {kind}"/>'
    size = f'width="{x + LANE // 2}" height="{ROW}"'
    return f'<svg class="tree" {size} aria-hidden="true"><path d="{"".join(path)}"/>{dot}</svg>'


def _shown(text: str) -> str:
    return _escaped(repr(text))


def _escaped(text: str) -> str:
    return entities.escape(printable(text))
