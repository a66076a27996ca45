"""Synthesize edit documents for training: each has a task, a code snippet of the corpus, and the snippet after the
edit. Drills are edit documents of words in random order.

They teach the model to copy and change code in its context. Each edit is checked by parsing the result. The functions
in KINDS, one for each kind of edit, return (task, edited code), or None if they find nothing to edit.
"""

from __future__ import annotations

import ast
import io
import random
import re
import textwrap
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator

from tqdm import tqdm

from .corpus import Document

RESULT = "\n# Result:\n"
"""Between the code before an edit and the code after it."""
MIN_CHARS, MAX_CHARS = 150, 2400
REPEAT = "repeat the code unchanged"
NUMBERS = (2, 3, 5, 7, 8, 10, 12, 16, 20, 32, 42, 64, 100, 128, 256, 1000)
Span = tuple[int, int, str]
Edit = tuple[str, str]


def apply(code: str, spans: list[Span]) -> str:
    """Return the code with all spans applied. A span (start, end, text) replaces the characters start to end - 1 by the
    text."""
    for start, end, text in sorted(spans, reverse=True):
        code = code[:start] + text + code[end:]
    return code


def line_starts(code: str) -> list[int]:
    """Return the character offset at which each line begins. Adding the column of an AST node gives the node's offset,
    but only in ASCII code, since AST columns count bytes."""
    starts = [0]
    for line in code.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def rename(code: str, tree: ast.Module, rng: random.Random, names: list[str]) -> Edit | None:
    """Rename a local variable or parameter everywhere in the snippet. Returns (task, edited code), or None if there is
    nothing to rename. names: names from which the new one is drawn."""
    places: dict[str, list[tuple[int, int]]] = {}
    bound: set[str] = set()
    blocked: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            places.setdefault(node.arg, []).append((node.lineno, node.col_offset))
            bound.add(node.arg)
        elif isinstance(node, ast.Name):
            places.setdefault(node.id, []).append((node.lineno, node.col_offset))
            bound.update([node.id] if isinstance(node.ctx, ast.Store) else [])
        elif isinstance(node, ast.Global | ast.Nonlocal):
            blocked.update(node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
            blocked.add(node.name or "")
        elif isinstance(node, ast.JoinedStr | ast.MatchAs | ast.MatchStar | ast.Import | ast.ImportFrom):
            # Positions inside f-strings are unreliable before Python 3.12, so their names stay.
            blocked.update(name.id for name in ast.walk(node) if isinstance(name, ast.Name))
            blocked.update(alias.asname or alias.name for alias in getattr(node, "names", []))
            blocked.add(getattr(node, "name", None) or "")
    choices = [n for n in bound - blocked - {"self", "cls", "_"} if len(places[n]) >= 2]
    new = rng.choice(names)
    if not choices or new in code:
        return None
    old = rng.choice(sorted(choices))
    starts = line_starts(code)
    begins = [starts[line - 1] + column for line, column in places[old]]
    spans = [(begin, begin + len(old), new) for begin in begins]
    return f"rename `{old}` to `{new}`", apply(code, spans)


def remove_comments(code: str, tree: ast.Module, rng: random.Random, names: list[str]) -> Edit | None:
    """Remove every comment, and its line if the line has nothing else. Returns (task, edited code), or None if there
    are no comments."""
    starts, spans = line_starts(code), []
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            before = code[starts[row - 1] : starts[row - 1] + column]
            if before.strip():
                spans.append((starts[row - 1] + len(before.rstrip()), starts[row - 1] + token.end[1], ""))
            else:
                spans.append((starts[row - 1], starts[row], ""))
    return ("remove the comments", apply(code, spans)) if spans else None


def remove_docstrings(code: str, tree: ast.Module, rng: random.Random, names: list[str]) -> Edit | None:
    """Remove the docstrings of functions and classes, unless the body is only a docstring. Returns (task, edited code),
    or None if there are none to remove."""
    starts, spans = line_starts(code), []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and len(node.body) > 1:
            first = node.body[0]
            if ast.get_docstring(node, clean=False) is not None and first.lineno > node.lineno:
                spans.append((starts[first.lineno - 1], starts[first.end_lineno or first.lineno], ""))
    return ("remove the docstrings", apply(code, spans)) if spans else None


def replace_constant(code: str, tree: ast.Module, rng: random.Random, names: list[str]) -> Edit | None:
    """Replace every occurrence of one decimal integer by another one. Returns (task, edited code), or None if there is
    nothing to replace."""
    numbers = [t for t in tokenize.generate_tokens(io.StringIO(code).readline) if t.type == tokenize.NUMBER]
    values = sorted({t.string for t in numbers if t.string.isdigit() and len(t.string) < 5})
    if not values:
        return None
    old, new = rng.choice(values), str(rng.choice(NUMBERS))
    starts = line_starts(code)
    places = [starts[t.start[0] - 1] + t.start[1] for t in numbers if t.string == old]
    edited = apply(code, [(place, place + len(old), new) for place in places])
    return (f"replace the number {old} with {new}", edited) if old != new else None


def hint_spans(code: str, tree: ast.Module) -> list[Span]:
    """Return the spans of code to delete so that parameters and return values lose their type hints."""
    starts, spans = line_starts(code), []

    def end(node: ast.expr) -> int:
        return starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)

    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            begin = starts[node.lineno - 1] + node.col_offset + len(node.arg)
            spans.append((begin, end(node.annotation), ""))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            begin = code.rfind(")", 0, starts[node.returns.lineno - 1] + node.returns.col_offset) + 1
            if code[begin:].lstrip().startswith("->"):
                spans.append((begin, end(node.returns), ""))
    return spans


def remove_hints(code: str, tree: ast.Module, rng: random.Random, names: list[str]) -> Edit | None:
    """Remove the type hints of all parameters and return values. Returns (task, edited code), or None if there are
    none."""
    spans = hint_spans(code, tree)
    return ("remove the type hints", apply(code, spans)) if spans else None


def repeat(code: str, tree: ast.Module, rng: random.Random, names: list[str]) -> Edit | None:
    """Make the edit that changes nothing. Returns (task, unchanged code)."""
    return REPEAT, code


KINDS: list[tuple[Callable[..., Edit | None], int]] = [
    (rename, 150),
    (remove_comments, 10),
    (remove_docstrings, 7),
    (replace_constant, 10),
    (remove_hints, 8),
    (repeat, 10),
]


def snippets(document: Document) -> list[str]:
    """Return the source code of a file's functions and small classes, dedented. Code that is not ASCII is left out."""
    lines = document.text.split("\n")
    found = []
    for node in ast.walk(ast.parse(document.text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            code = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])) + "\n"
            if MIN_CHARS <= len(code) <= MAX_CHARS and code.isascii():
                found.append(code)
    return found


def edit_document(code: str, rng: random.Random, names: list[str]) -> str | None:
    """Draw a kind of edit, apply it to a snippet, and return the text of the edit document. None if this edit does not
    apply to the snippet."""
    kind = rng.choices([k for k, _ in KINDS], [weight for _, weight in KINDS])[0]
    try:
        tree = ast.parse(code)
        edit = kind(code, tree, rng, names)
        if edit is None:
            return None
        ast.parse(edit[1])
    except (SyntaxError, ValueError, tokenize.TokenError):
        return None
    return f"# Task: {edit[0]}\n{code}{RESULT}{edit[1]}"


def edit_documents(documents: list[Document], seed: int, chars: float) -> Iterator[Document]:
    """Yield edit documents made from snippets of ``documents``, until they have ``chars`` characters in total."""
    yield from _made(documents, edit_document, "edit", 4, seed, chars)


def _made(
    documents: list[Document],
    make: Callable[[str, random.Random, list[str]], str | None],
    source: str,
    most: int,
    seed: int,
    budget: float,
) -> Iterator[Document]:
    """Yield what `make` makes of snippets, at most ``most`` of a document at a time, until ``budget`` is used up.

    budget: number of characters.
    """
    rng = random.Random(seed)
    names = training_names(rng.sample(documents, min(len(documents), 4000)), rng)
    progress = tqdm(total=int(budget), desc=f"{source} documents", unit="B", unit_scale=True)
    while budget > 0:
        document = rng.choice(documents)
        choices = snippets(document)
        for code in rng.sample(choices, min(most, len(choices))):
            text = make(code, rng, names)
            if text is not None:
                budget -= len(text)
                progress.update(len(text))
                yield Document(source, f"{document.source}/{document.path}", text)
    progress.close()


def drill(code: str, rng: random.Random, names: list[str]) -> str | None:
    """Return the text of an edit document whose code are the snippet's words in random order, many of them several
    times. The task is to rename one, or to repeat the code. Returns None if the snippet has no word to rename.

    What comes next cannot be guessed from the words before, so only a model that finds its place in the code before
    the edit gets it right.
    """
    words = re.findall(r"\w+\W+", code)
    few = rng.sample(words, min(len(words), rng.randint(8, 60)))
    old, new = rng.choice(few), rng.choice(names)
    words = rng.choices([*few, *_relatives(old, rng)] if rng.random() < 0.5 else few, k=rng.randint(16, 100))
    words.insert(rng.randrange(len(words)), old)
    task, before, after = REPEAT, "".join(words), "".join(words)
    if rng.random() < 0.75:
        name = re.match(r"[A-Za-z_]\w*", old)
        if name is None or new in before:
            return None
        task, after = f"rename `{name[0]}` to `{new}`", rename_word(before, name[0], new)
    return f"# Task: {task}\n{before}{RESULT}{after}"


def rename_word(text: str, old: str, new: str) -> str:
    """Rename a word of a drill, but not attributes (`self.word`) and keywords of calls (`f(word=1)`), which `rename`
    leaves as they are, too."""
    return re.sub(rf"(?<![.\w]){old}(?!\w|=[^=])", new, text)


def _relatives(old: str, rng: random.Random) -> list[str]:
    """Return words that share a part with `old`, or have its name as an attribute or a keyword: a rename leaves these
    as they are."""
    name = re.match(r"\w+", old)
    if name is None or len(name[0]) < 2:
        return []
    word, rest = name[0], old[name.end() :]
    cut = rng.randrange(1, len(word))
    parts = word[:cut], word[cut:], f"{word}_{word[:cut]}", f"{word}s"
    return [*(part + rest for part in parts), f"self.{word} = {old}", f"{word}={old}"]


def drills(documents: list[Document], seed: int, chars: float) -> Iterator[Document]:
    """Yield drills made from snippets of ``documents``, until they have ``chars`` characters in total."""
    yield from _made(documents, drill, "drill", 8, seed, chars)


def common_names(documents: list[Document], least: int = 3) -> list[str]:
    """Return the variable names that at least ``least`` documents use."""
    return sorted(name for name, count in _names(documents).items() if count >= least)


def training_names(documents: list[Document], rng: random.Random) -> list[str]:
    """Return the names from which training draws new ones: each variable name once, so that the model sees every token
    in a new name, and as many by the number of documents that use them. Frequent names (`len`, `enumerate`) are those
    that the model expects elsewhere, and has to write where the task says so."""
    counts = _names(documents)
    return [*counts, *rng.choices(list(counts), list(counts.values()), k=len(counts))]


def _names(documents: list[Document]) -> Counter[str]:
    """Return the number of documents that use each variable name of 3 to 19 lowercase characters."""
    counts: Counter[str] = Counter()
    for document in documents:
        used = {n.id for n in ast.walk(ast.parse(document.text)) if isinstance(n, ast.Name)}
        counts.update(sorted(name for name in used if 2 < len(name) < 20 and name.islower()))
    return counts
