"""`spec-decode suffix`: commands that build output caches from text files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click

from specdec_core import ConfigError, check_text, shown


@click.group()
def suffix() -> None:
    """Output caches for the method suffix."""


@suffix.command()
@click.argument("corpus", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The cache to write.")
@click.option("--model", default="tiny", show_default=True, help="Model whose tokenizer is used: a folder, or a name.")
@click.option("--field", default="text", show_default=True, help="Key of the text in each line of JSONL.")
def build(corpus: tuple[Path, ...], out: Path, model: str, field: str) -> None:
    """Build a cache from texts that resemble the expected outputs.

    CORPUS: text files with one output each, or .jsonl files with one output per line. If the cache exists, the outputs
    are appended. To use the cache, set suffix_decoding_cache_path to its path.
    """
    from specdec_core import EngineConfig, load_tokenizer
    from specdec_proposer_suffix.cache_file import UnusableFileError, load_sequences, sole_writer

    tokenizer = load_tokenizer(EngineConfig(model=model))
    new = []
    for path in corpus:
        for text in _texts(path, field):
            token_ids = tokenizer(text, add_special_tokens=False, return_tensors="np", verbose=False)["input_ids"][0]
            if len(token_ids):
                new.append(token_ids.astype("int32"))
    with sole_writer(out) as save:
        try:
            sequences = load_sequences(out, len(tokenizer)) if out.exists() else []
        except UnusableFileError as error:
            raise ConfigError(f"--out {str(out)!r} {error}: name another file, or delete it") from error
        save([*sequences, *new])
    num_tokens = sum(map(len, new))
    click.echo(f"{out}: {len(new)} outputs of {num_tokens} tokens added, {len(sequences) + len(new)} in all")


def _texts(path: Path, field: str) -> Iterator[str]:
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"corpus {str(path)!r} is not UTF-8 text: byte {error.start}") from error
    if path.suffix.lower() != ".jsonl":
        yield content
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield _text_of(line, field, f"corpus {str(path)!r}, line {number}")


def _text_of(line: str, field: str, where: str) -> str:
    try:
        text = json.loads(line)[field]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{where} is {shown(line, 60)}: give a JSON object with a text as {field!r}") from error
    if not isinstance(text, str):
        raise ConfigError(f"{where} has {shown(text, 60)} as {field!r}: give a text")
    check_text(text, f"{where} has {shown(text, 60)} as {field!r}, which")
    return text
