"""Imports point one way: upwards in LAYERS never, and from core to a plugin never.

Imports inside functions count, for they put off a dependency without removing it. Those under `if TYPE_CHECKING` do
not: they never run, so they can neither load a module nor close a circle. Modules of one layer may import each other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import specdec_core

ROOT = Path(__file__).parents[1]
LAYERS = (
    {"__init__"},
    {"types", "errors", "tree_layout", "token_tree", "validators", "converters", "hashing", "losses"},
    {"config", "config_file", "sampling_params"},
    {"proposer", "verifier", "kv_manager", "training"},
    {"hookspecs"},
    {"plugins"},
    {"ops"},
    {"sampling", "kv", "verifiers", "target", "metrics", "drafting", "merging", "checkpoint"},
    {"builtin"},
    {"engine"},
    {"llm", "async_llm", "dry_run", "draft_checkpoint", "frontend", "legacy", "prompts", "outputs"},
    {"testing"},
    {"cli", "__main__"},
)
RANK = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}
OUTSIDE = sorted(
    path.parent for path in [*ROOT.glob("proposers/*/specdec_*/__init__.py"), *ROOT.glob("train/*/__init__.py")]
)


def sources(package: Path) -> dict[str, str]:
    """{dotted module name: source}; a package's own file is called package.__init__."""
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): path.read_text()
        for path in sorted(package.rglob("*.py"))
    }


def imports(module: str, source: str) -> Iterator[str]:
    """Everything the module imports or reaches through `specdec_core.`, as dotted names."""
    for node in _running(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "specdec_core":
            yield f"specdec_core.{node.attr}"
        elif isinstance(node, ast.Call) and _called(node) in {"import_module", "__import__"}:
            yield from (name.value for name in node.args[:1] if isinstance(name, ast.Constant))


def _running(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            for other in child.orelse:
                yield from (other, *_running(other))
        else:
            yield child
            yield from _running(child)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def core_faults(modules: Mapping[str, str]) -> list[str]:
    faults = []
    for module, source in modules.items():
        own = module.split(".")[1]
        if own not in RANK:
            faults.append(f"{module} has no layer: add {own!r} to LAYERS")
            continue
        for name in imports(module, source):
            top, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if top.startswith("specdec_") and top != "specdec_core":
                faults.append(f"{module} imports {name}: core imports no other package of ours")
            elif top != "specdec_core" or other in {"", "__version__", own}:
                continue
            elif other not in RANK:
                faults.append(f"{module} imports {name}: import it from the module that defines it")
            elif RANK[other] > RANK[own]:
                faults.append(f"{module} imports {name}: {other!r} lies above {own!r}")
    return faults


def faults_outside(modules: Mapping[str, str]) -> list[str]:
    public = {f"specdec_core.{name}" for name in specdec_core.__all__}
    public |= {f"{module}.{name}" for name, module in specdec_core._MODULES.items()}
    faults = []
    for module, source in modules.items():
        for name in imports(module, source):
            top = name.partition(".")[0]
            if top == "specdec_core" and name not in {"specdec_core", *public}:
                faults.append(f"{module} imports {name}, which is not a public name of specdec_core")
            elif top.startswith("specdec_") and top not in {"specdec_core", module.partition(".")[0]}:
                faults.append(f"{module} imports {name}: packages do not import each other")
    return faults


def test_core_imports_point_one_way():
    assert core_faults(sources(ROOT / "core" / "specdec_core")) == []


@pytest.mark.parametrize("package", OUTSIDE, ids=lambda path: path.name)
def test_packages_import_only_public_names(package):
    assert faults_outside(sources(package)) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("specdec_core.types", "import specdec_core.engine"),
        ("specdec_core.types", "from specdec_core.engine.engine import Engine"),
        ("specdec_core.types", "from specdec_core import engine"),
        ("specdec_core.types", "from . import engine"),
        ("specdec_core.kv.paged", "from ..engine import Engine"),
        ("specdec_core.kv.__init__", "from ..engine import Engine"),
        ("specdec_core.ops.attention", "def f():\n    if x:\n        from specdec_core.kv import paged"),
        ("specdec_core.plugins.manager", "if TYPE_CHECKING:\n    pass\nelse:\n    import specdec_core.llm"),
        ("specdec_core.plugins.manager", "importlib.import_module('specdec_core.builtin')"),
        ("specdec_core.plugins.manager", "import specdec_core\nspecdec_core.LLM"),
        ("specdec_core.engine.engine", "from specdec_core import Draft"),
        ("specdec_core.cli.plugins", "import specdec_proposer_ngram"),
        ("specdec_core.__init__", "from specdec_core.types import Draft"),
        ("specdec_core.novelty", ""),
    ],
)
def test_a_fault_in_core_is_noticed(module, source):
    assert len(core_faults({module: source})) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("specdec_core.types", "if TYPE_CHECKING:\n    from specdec_core.engine import Engine"),
        ("specdec_core.engine.engine", "from .request import Request\nfrom ..types import Draft\nimport torch.types"),
        ("specdec_core.cli.plugins", "import specdec_core\nspecdec_core.__version__"),
    ],
)
def test_what_core_may_import(module, source):
    assert core_faults({module: source}) == []


@pytest.mark.parametrize(
    "source",
    [
        "from specdec_core.engine.scheduler import Scheduler",
        "import specdec_core.types",
        "from specdec_core.types import _offsets",
        "def build():\n    from specdec_proposer_other import helper",
    ],
)
def test_a_fault_in_a_proposer_is_noticed(source):
    assert len(faults_outside({"specdec_proposer_mine.build": source})) == 1


def test_what_a_proposer_may_import():
    source = "from specdec_core import Draft\nfrom specdec_core.proposer import ProposerSpec\nfrom . import rest\n"
    assert faults_outside({"specdec_proposer_mine.__init__": source + "import specdec_proposer_mine.rest"}) == []
