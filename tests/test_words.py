"""Documents, docstrings, comments and error messages use the field's words, so that a search for a term finds its code.

python tests/test_words.py [PATH ...]    # lists the words to replace, in all tracked files or in those below the paths
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BEFORE_PASS = r"""(?:a|an|the|one|two|three|this|that|each|every|per|no|of|in|first|second|last|next|same|several|many
    |few|fewer|trial|decode|decoding|prefill|prompts?|plain|speculative|drafting|decoder|verifying|whole|single|later
    |earlier|wrong|passed|padded|of\ nodes|such|its|their|own|between|whose|\w+'s|late|slow|more|these|those|all)"""
SPEAKERS = r"(?:target|model|head|draft|drafter|proposer|tensor|level|request|match|token|verifier|layer)"
BRITISH = r"""(?:quanti|tokeni|initiali|optimi|normali|speciali|generali|summari|organi|recogni|reali|utili|minimi
    |maximi|seriali|vectori|randomi|paralleli|penali|prioriti|memori|synchroni|materiali|visuali|customi|standardi
    |factori|finali|locali|moderni|emphasi|characteri|categori|equali|stabili|regulari|capitali|critici)"""

# What to look for: (pattern, what to say instead). Patterns name one sense of a word, not the word in all its senses.
PUT_AWAY = {
    "assistant, candidate": (r"\bassistants?\b(?!'s\ answer)|\bcandidates?\b", "draft, draft token, node"),
    "gamma, speculate_k": (r"\bgamma\b|\bspeculate_k\b", "num_draft_tokens, max_draft_tokens"),
    "budget of nodes": (r"\bbudgets?\ of\ (?:\w+\ )?nodes?\b", "max_draft_tokens"),
    "pass": (
        (
            rf"(?<!forward\ )\b(?<!-){BEFORE_PASS}\ +pass(?:es)?\b(?!\ over\ (?:memory|q\b|it\b|the\ data))"
            r"|(?<!forward\ )\bpasses\ (?:whose|are|with|of|\d)|(?:^|[.:;,(]\ )\W*pass(?:es)?\ (?:of|over)\ (?!memory)"
        ),
        "forward pass",
    ),
    "models that say, tell": (
        (
            rf"\bwhat\ (?:it|they|(?:the|a|its)\ {SPEAKERS}s?)\ (?:itself\ |themselves\ )?(?:says?|tells?|said|told)\b"
            rf"|\b{SPEAKERS}s?(?:\ itself|\ models?)?\ (?:says?|tells?|said|told)\b"
        ),
        "predict, generate, return, specify, declare",
    ),
    "who sees whom": (r"\bwho\ sees\ whom\b|\bwhom\b", "attention mask; which"),
    "whoever, nobody": (r"\bwhoever\b|\bwhomever\b|\bnobody\b", "the caller, another thread, no request: the actor"),
    "ends": (r"\b(?:two|both|raw|model's|family's|its)\ ends\b(?!\ (?:with|in|at|of|where))", "embedding and LM head"),
    "page": (r"(?<!this\ )(?<!huge\ )(?<!front\ )(?<!man\ )\bpages?\b", "block"),
    "p, q": (
        (
            r"(?<![\w.*/=-])[pq](?=\ */\ *[pq]\b)|(?<![\w.=-])[pq]\(\w*\)"
            r"|(?<![\w./=-])[Pp](?=\ (?:and|or|of|is|at|over)\b)|\bdistributions?\ [pq]\b"
        ),
        "target_probs, draft_probs",
    ),
    "British spelling": (
        (
            rf"\b(?:re|de|un|pre|non)?-?{BRITISH}s(?:e|ed|es|er|ers|ing|ation|ations|able)\b|\banalys(?:e|ed|ing)\b"
            r"|\b\w*(?:colou|behaviou|favou|honou|neighbou|labou|flavou|rumou)r\w*\b|\blicences?\b|\bcent(?:re|res|red)\b"
            r"|\bdefence\b|\b(?:label|model|travel)l(?:ed|ing)\b|\bcatalogues?\b|\bprogrammes?\b|\bgrey\b|\bwhilst\b"
            r"|\bamongst\b|\bjudgement\b|\bartefacts?\b|\blearnt\b|\bfulfil\b"
        ),
        "American spelling",
    ),
    "is none": (r"(?<!there\ )\b(?:is|are|was|were)\ (?-i:none)\b(?!\ of)", "is not a ..., is refused, has no ..."),
    "to be had": (r"\b(?:be|been|is|are)\ had\b", "available"),
    "lets be": (r"\b(?:lets?|leaves?)\ (?:everything|all|it|them)\ be\b", "does nothing, is a no-op"),
    "by and by": (r"\bby\ and\ by\b", "gradually, over the steps"),
}
PATTERNS = {name: re.compile(f"(?x:{pattern})", re.IGNORECASE) for name, (pattern, _) in PUT_AWAY.items()}

ALLOWED = {  # (path, a part of the line): why
}
"""Exceptions, at most 20 in the whole tree."""

IMPLEMENTED_IN = {
    "tree attention": [
        "core/specdec_core/engine/tree_mask.py",
        "core/specdec_core/ops/attention_plan.py:AttentionPlan",
    ],
    "attention mask": ["core/specdec_core/engine/tree_mask.py", "core/specdec_core/ops/attention_plan.py"],
    "forward pass": ["core/specdec_core/engine/runner.py", "core/specdec_core/models/model.py:Model.forward"],
    "rejection sampling": ["core/specdec_core/verifiers/rejection.py", "core/specdec_core/verifiers/siblings.py"],
    "acceptance rate": ["core/specdec_core/engine/metrics.py", "core/specdec_core/budget/rates.py"],
    "hidden states": [
        "core/specdec_core/models/model.py:register_tap",
        "core/specdec_core/contracts/proposer.py:Observation",
    ],
    "LM head": ["core/specdec_core/models/embedding_and_head.py"],
}
"""{term: where it is implemented, each a file or file:name}."""


def tracked(paths: Sequence[str] = ()) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *paths], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name.endswith((".md", ".py"))]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) for each piece of prose in a file. Code in backticks is masked; line breaks are kept."""
    source = path.read_text()
    for line, text in _markdown(source) if path.suffix == ".md" else _python(source):
        yield line, re.sub(r"`[^`]*`", lambda code: re.sub(r"[^\n]", "~", code[0]), text)


def _markdown(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) for each piece of prose in a Markdown document, including that in its Python examples."""
    line = 1
    for number, part in enumerate(re.split(r"(?m)^ *```", source)):
        if number % 2 == 0:
            yield line, part
        elif part.startswith("python"):
            yield from ((line + below - 1, text) for below, text in _python(part.removeprefix("python")))
        line += part.count("\n")


def _python(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) for each docstring, comment, error message and help text of an option in Python source."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, "\n".join(lines[node.lineno - 1 : node.end_lineno])
        elif isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _is_shown(node)):
            yield from ((each.lineno, text) for each in ast.walk(node) if (text := _string(each)))
    block: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start != (block[-1].start[0] + 1, block[-1].start[1]):
                yield _comment(block)
                block = []
            block.append(token)
    if block:
        yield _comment(block)


def _comment(block: Sequence[tokenize.TokenInfo]) -> tuple[int, str]:
    return block[0].start[0], "\n".join(token.string.lstrip("#").strip() for token in block)


def _is_shown(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name.endswith("Error") or name in {"option", "field"}


def _string(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def faults(paths: Sequence[str] = ()) -> Iterator[tuple[str, int, str, str]]:
    """Yield each use of a word that PUT_AWAY replaces, as (path, line, the key in PUT_AWAY, the words found)."""
    for path in tracked(paths):
        found = set()
        for line, text in prose(path):
            # A line break counts as a space, so that a term is found across it.
            flat = re.sub(r"\n *", lambda gap: " " * len(gap[0]), text)
            flat = re.sub(r"(?<=\S) {2,}(?=\S)", lambda gap: " " + "\0" * (len(gap[0]) - 1), flat)
            kept = [at for at, letter in enumerate(flat) if letter != "\0"]
            flat = flat.replace("\0", "")
            for name, pattern in PATTERNS.items():
                for match in pattern.finditer(flat):
                    at = line + text.count("\n", 0, kept[match.start()])
                    found.add((str(path.relative_to(ROOT)), at, name, match[0].strip()))
        yield from sorted(found)


def docstring(place: str) -> str:
    path, _, name = place.partition(":")
    node = ast.parse((ROOT / path).read_text())
    for part in name.split(".") if name else []:
        node = next(each for each in node.body if getattr(each, "name", None) == part)
    return " ".join((ast.get_docstring(node) or "").split())


def allowed(path: str, line: int) -> tuple[str, str] | None:
    words = (ROOT / path).read_text().splitlines()[line - 1]
    return next(((where, part) for where, part in ALLOWED if where == path and part in words), None)


@pytest.mark.nightly  # make lint runs this file, too
def test_put_away_words_do_not_come_back():
    used, wrong = set(), []
    for path, line, name, words in faults():
        if exception := allowed(path, line):
            used.add(exception)
        else:
            wrong.append(f"{path}:{line}: {words!r}: say {PUT_AWAY[name][1]}")
    assert wrong == []
    assert set(ALLOWED) == used, "these are allowed, and there is no such line any more"
    assert len(ALLOWED) <= 20


@pytest.mark.parametrize("term", IMPLEMENTED_IN)
def test_a_search_for_a_term_finds_its_implementation(term):
    missing = [place for place in IMPLEMENTED_IN[term] if term.lower() not in docstring(place).lower()]
    assert missing == []


SAMPLES = {
    "assistant, candidate": ("the likeliest of all candidates", "begin the assistant's answer"),
    "gamma, speculate_k": ("gamma draft tokens", "the gammas"),
    "budget of nodes": ("a budget of 5 nodes", "a budget in nodes"),
    "pass": (
        "One pass of the target\n    over roots",
        "a forward\n    pass; it must pass; pass a folder; one pass over memory",
    ),
    "models that say, tell": ("texts that the model itself says", "the README says what to do"),
    "who sees whom": ("Who sees whom in a batch", "who sees it"),
    "whoever, nobody": ("raised by whoever has it", "raised by the thread that has it"),
    "ends": ("what a family does at its two ends", "it ends with the line"),
    "page": ("the pages of a request", "paged attention, on this page"),
    "p, q": ("accepted with min(1, p/q)", "stored in `q`, top_p=0.5, draft.q"),
    "British spelling": ("a quantised model's behaviour", "precise, otherwise, a promised size; summaries"),
    "is none": ("a truth value is none", "where there is none"),
    "to be had": ("cuda is not to be had here", "it had been read"),
    "lets be": ("it lets everything be", "let it begin"),
    "by and by": ("it learns by and by", "one by one"),
}


@pytest.mark.parametrize("name", PUT_AWAY)
def test_patterns(name, tmp_path, monkeypatch):
    """Each pattern matches its bad sample in a docstring, comment, error message and document. It does not match its
    good sample."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "tracked", lambda paths=(): sorted(tmp_path.iterdir()))
    bad, good = SAMPLES[name]
    for words, expected in ((bad, {name}), (good, set())):
        comment = words.replace("\n    ", "\n# ")
        (tmp_path / "docstring.py").write_text(f'def f():\n    """Of {words}."""\n')
        (tmp_path / "comment.py").write_text(f"# Of {comment}\n")
        (tmp_path / "error.py").write_text(f"raise ValueError({' '.join(words.split())!r})\n")
        (tmp_path / "document.md").write_text(f"Of {words}\n")
        (tmp_path / "example.md").write_text(f"```python\n# Of {comment}\n```\n")
        for path in sorted(tmp_path.iterdir()):
            assert {fault[2] for fault in faults() if fault[0] == path.name} == expected, path.name


if __name__ == "__main__":
    places = [
        f"{path}:{line}: {words!r}: say {PUT_AWAY[name][1]}"
        for path, line, name, words in faults(sys.argv[1:])
        if not allowed(path, line)
    ]
    sys.exit("\n".join([*places, f"{len(places)} places"]) if places else 0)
