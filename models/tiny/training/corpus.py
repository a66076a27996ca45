"""Collect the training corpus: permissively licensed Python sources that corpus.toml lists.

Output: two JSONL files of {"source", "path", "text"}, ``train.jsonl`` and ``heldout.jsonl``.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .filters import MAX_BYTES, VENDORED, Deduplicator, clean

MANIFEST = Path(__file__).with_name("corpus.toml")
MAX_TEST_SHARE = 0.25


@dataclass(frozen=True)
class Document:
    """One source file: the distribution from which it comes, its path in the distribution, and its text."""

    source: str
    path: str
    text: str


def load_manifest(path: Path = MANIFEST) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def normalize(name: str) -> str:
    """A distribution's name in pip's canonical form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def identity(wheel: Path) -> tuple[str, str]:
    """Return the (normalized name, version) that the file name of a wheel states."""
    name, version, *_ = wheel.name.split("-")
    return normalize(name), version


def download(package: dict[str, Any], folder: Path) -> Path:
    """Return the path of a package's wheel in ``folder``, in the pinned version. It is downloaded with pip if it is not
    there."""
    wheels = {identity(wheel): wheel for wheel in folder.glob("*.whl")}
    wanted = (normalize(package["name"]), package["version"])
    if wanted in wheels:
        return wheels[wanted]
    requirement = f"{package['name']}=={package['version']}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), requirement]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"pip could not download {requirement}: {done.stderr.strip()[-300:]!r}; "
            f"check the connection, or change the pinned version in {MANIFEST.name}"
        )
    return next(wheel for wheel in folder.glob("*.whl") if identity(wheel) == wanted)


def package_files(package: dict[str, Any], folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of every Python file in the package's modules. The manifest decides whether the files come
    from the installed package or from a wheel.

    package: an entry of the manifest (corpus.toml).
    folder: where wheels are downloaded.

    Raises RuntimeError if the files are to come from the installed package, but its version is not the manifest's.
    """
    wanted = tuple(f"{module}/" for module in package["modules"])
    if package["source"] == "installed":
        version = importlib.metadata.version(package["name"]).split("+")[0]
        if version != package["version"]:
            raise RuntimeError(
                f"{package['name']} {version} is installed, but the corpus takes {package['version']}; "
                f"install that version, or change it in {MANIFEST.name}"
            )
        files = importlib.metadata.files(package["name"]) or []
        for file in files:
            if str(file).startswith(wanted) and file.suffix == ".py":
                yield str(file), Path(str(file.locate())).read_bytes()
        return
    with zipfile.ZipFile(download(package, folder)) as wheel:
        for name in wheel.namelist():
            if name.startswith(wanted) and name.endswith(".py"):
                yield name, wheel.read(name)


def stdlib_files() -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of every Python file of the running interpreter's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        yield file.relative_to(root).as_posix(), file.read_bytes()


def is_heldout_stdlib(path: str, names: list[str]) -> bool:
    """Return whether a file of the standard library belongs to a held-out module, or is a test of one.

    path: relative to the library's folder.
    names: files and folders of the held-out modules.
    """
    stems = {name.removesuffix(".py") for name in names}
    parts = path.split("/")
    if parts[0] in names:
        return True
    tested = parts[1:2] if parts[0] in ("test", "idlelib") else []
    return any(part.removesuffix(".py").removeprefix("test_") in stems for part in tested)


def select(files: list[tuple[str, str]], source: str, budget: int, seen: Deduplicator) -> list[Document]:
    """Select files in a fixed pseudo-random order, with at most ``budget`` characters in total and at most a quarter of
    these in tests.

    files: (path, text) pairs, which are sorted in place.
    seen: rejects near-duplicates of files that were selected before.
    """
    files.sort(key=lambda item: hashlib.sha256(f"{source}/{item[0]}".encode()).digest())
    kept, used, tests = [], 0, 0
    for path, text in files:
        is_test = "test" in path.lower()
        if used + len(text) > budget or (is_test and tests + len(text) > MAX_TEST_SHARE * budget):
            continue
        if seen.admit(text):
            kept.append(Document(source, path, text))
            used += len(text)
            tests += len(text) if is_test else 0
    return kept


def clean_all(raw: Iterator[tuple[str, bytes]], pool: ProcessPoolExecutor) -> list[tuple[str, str]]:
    """Clean the texts of files with `filters.clean`. Returns (path, text) of the files that it accepts and that are
    neither vendored nor too large.

    raw: (path, content) of the files.
    pool: the processes that do the work.
    """
    named = [(path, data) for path, data in raw if not VENDORED.search(path) and len(data) <= 2 * MAX_BYTES]
    texts = pool.map(clean, [data for _, data in named], chunksize=32)
    return [(path, text) for (path, _), text in zip(named, texts, strict=True) if text is not None]


def collect(work: Path) -> tuple[list[Document], list[Document]]:
    """Return the training documents and the held-out documents. Wheels are cached in ``work/wheels``."""
    manifest = load_manifest()
    folder = work / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    heldout: list[Document] = []
    train: list[Document] = []
    seen = Deduplicator()
    names = manifest["heldout"]["stdlib"]
    with ProcessPoolExecutor(2) as pool:
        library = clean_all(stdlib_files(), pool)
        # Held-out text goes first so that copies of it elsewhere count as duplicates.
        for path, text in library:
            is_module = not path.startswith(("test/", "idlelib/"))
            if is_module and is_heldout_stdlib(path, names) and seen.admit(text):
                heldout.append(Document("stdlib", path, text))
        packages = sorted(manifest["package"], key=lambda p: p["name"] not in manifest["heldout"]["packages"])
        progress = tqdm(packages, desc="packages", unit="pkg")
        for package in progress:
            progress.set_postfix_str(package["name"])
            budget = int(package["max_megabytes"] * 1e6)
            documents = select(clean_all(package_files(package, folder), pool), package["name"], budget, seen)
            (heldout if package["name"] in manifest["heldout"]["packages"] else train).extend(documents)
    rest = [item for item in library if not is_heldout_stdlib(item[0], names)]
    train += select(rest, "stdlib", int(manifest["stdlib"]["max_megabytes"] * 1e6), seen)
    return train, heldout


def write_jsonl(documents: list[Document], path: Path) -> None:
    """Write documents as JSON lines, replacing the file atomically."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(document)) + "\n" for document in documents)
    partial.replace(path)


def read_jsonl(path: Path) -> list[Document]:
    """Read the documents that :func:`write_jsonl` has written."""
    with path.open(encoding="utf-8") as file:
        return [Document(**json.loads(line)) for line in file]


def build(work: Path) -> None:
    """Collect the corpus and write ``train.jsonl``, ``heldout.jsonl`` and ``totals.json`` (characters of each training
    source) under ``work``, unless the first two files exist."""
    if (work / "train.jsonl").exists() and (work / "heldout.jsonl").exists():
        return
    train, heldout = collect(work)
    write_jsonl(heldout, work / "heldout.jsonl")
    write_jsonl(train, work / "train.jsonl")
    totals: dict[str, int] = {}
    for document in train:
        totals[document.source] = totals.get(document.source, 0) + len(document.text)
    (work / "totals.json").write_text(json.dumps(totals, indent=1))
    megabytes = sum(totals.values()) / 1e6
    print(f"{megabytes:.1f} MB in {len(train)} training files, {len(heldout)} held-out files")
