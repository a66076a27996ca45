"""Imports point one way: no module imports a module of a later layer in LAYERS, and core imports no plugin.

Imports inside functions count: they delay a dependency but do not remove it. Imports under `if TYPE_CHECKING` do not
count: they never run, so they can neither load a module nor close a cycle. Modules of one layer may import each other.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import specdec_core
from specdec_core.config import sampling
from specdec_core.config.sampling import SamplingParams
from specdec_core.models import families

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "specdec_core"
LAYERS = (
    {"__init__", "errors"},
    {"contracts", "config"},
    {"plugins", "ops"},
    {"kv", "sampling", "verifiers"},
    {"models"},
    {"ranks"},
    {"drafting"},
    {"budget"},
    {"engine"},
    {"api"},
    {"cli", "__main__"},
)
RANK = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}
OUTSIDE = sorted(
    path.parent
    for path in [
        *ROOT.glob("proposers/*/specdec_*/__init__.py"),
        *ROOT.glob("train/*/__init__.py"),
        *ROOT.glob("grammar/*/__init__.py"),
        *ROOT.glob("integrations/*/specdec_*/__init__.py"),
    ]
)


def sources(package: Path) -> dict[str, str]:
    """Return the source code of all modules of a package, by dotted name. The package's own file has the name
    package.__init__."""
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): path.read_text()
        for path in sorted(package.rglob("*.py"))
    }


def imports(module: str, source: str) -> Iterator[str]:
    """Yield the dotted names of everything that a module imports, or accesses as an attribute of specdec_core."""
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


def cycle_in(modules: Mapping[str, str]) -> list[str]:
    """Return modules that import each other in a cycle; empty if there is no cycle."""
    names = {module.removesuffix(".__init__") for module in modules}
    graph: dict[str, set[str]] = {}
    for module, source in modules.items():
        own = module.removesuffix(".__init__")
        targets = graph.setdefault(own, set())
        for name in imports(module, source):
            while name and name not in names:
                name = name.rpartition(".")[0]
            targets |= {name} - {"", "specdec_core", own}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return error.args[1]
    return []


def test_core_imports_point_one_way():
    assert core_faults(sources(CORE)) == []


def test_no_modules_of_core_import_each_other():
    assert cycle_in(sources(CORE)) == []


def test_the_landing():
    """The top folder of core contains only three modules beside its packages, so that a reader sees the structure of
    core at once."""
    loose = {path.stem for path in CORE.glob("*.py")}
    assert loose == {"__init__", "__main__", "errors"}


def test_what_plugins_are_listed_with_is_light():
    """Contracts, options and the plugin manager import neither torch nor numpy nor transformers, so plugins can be
    listed fast."""
    code = """if True:
        import sys, pkgutil, importlib, specdec_core
        for package in ("contracts", "config", "plugins"):
            found = importlib.import_module(f"specdec_core.{package}")
            for module in pkgutil.iter_modules(found.__path__):
                importlib.import_module(f"specdec_core.{package}.{module.name}")
        print([name for name in ("torch", "numpy", "transformers") if name in sys.modules])
    """
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_what_plugins_are_listed_with_is_small():
    files = [path for package in ("contracts", "plugins") for path in (CORE / package).glob("*.py")]
    assert len(files) > 10
    assert sum(len(path.read_text().splitlines()) for path in files) <= 2200


def test_docstrings_list_the_readers_of_sampling_parameters_and_of_families():
    parameters = "|".join(vars(SamplingParams)["__annotations__"])
    reads = re.compile(rf"\b(params|p)\.({parameters})\b")
    for listing, is_reader in ((sampling, reads.search), (families, re.compile("models.families import").search)):
        readers = [path for path in CORE.rglob("*.py") if is_reader(path.read_text())]
        assert len(readers) > 5
        for path in readers:
            assert f"`{path.stem}`" in listing.__doc__ or f"{path.parent.name}/{path.name}`" in listing.__doc__, path


def test_examples_import_only_public_names():
    modules = {path.stem: path.read_text() for path in ROOT.glob("examples/plugins/*/*.py") if "test_" not in path.name}
    assert modules
    assert faults_outside(modules) == []


@pytest.mark.parametrize("package", OUTSIDE, ids=lambda path: path.name)
def test_packages_import_only_public_names(package):
    assert faults_outside(sources(package)) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("specdec_core.contracts.draft", "import specdec_core.engine"),
        ("specdec_core.contracts.draft", "from specdec_core.engine.engine import Engine"),
        ("specdec_core.contracts.draft", "from specdec_core import engine"),
        ("specdec_core.contracts.draft", "from .. import engine"),
        ("specdec_core.kv.paged", "from ..engine import Engine"),
        ("specdec_core.kv.__init__", "from ..engine import Engine"),
        ("specdec_core.ops.attention", "def f():\n    if x:\n        from specdec_core.kv import paged"),
        ("specdec_core.plugins.manager", "if TYPE_CHECKING:\n    pass\nelse:\n    import specdec_core.api"),
        ("specdec_core.plugins.manager", "importlib.import_module('specdec_core.verifiers')"),
        ("specdec_core.plugins.manager", "import specdec_core\nspecdec_core.LLM"),
        ("specdec_core.engine.engine", "from specdec_core import Draft"),
        ("specdec_core.cli.plugins", "import specdec_proposer_ngram"),
        ("specdec_core.__init__", "from specdec_core.contracts.draft import Draft"),
        ("specdec_core.novelty", ""),
    ],
)
def test_a_fault_in_core_is_noticed(module, source):
    assert len(core_faults({module: source})) == 1


def test_a_circle_is_noticed():
    circle = {
        "specdec_core.engine.a": "def f():\n    from specdec_core.engine.b import g",
        "specdec_core.engine.b": "from specdec_core.engine import a",
    }
    assert len(cycle_in(circle)) == 3


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("specdec_core.contracts.draft", "if TYPE_CHECKING:\n    from specdec_core.engine.engine import Engine"),
        (
            "specdec_core.engine.engine",
            "from .request import Request\nfrom ..contracts.draft import Draft\nimport torch.types",
        ),
        ("specdec_core.cli.plugins", "import specdec_core\nspecdec_core.__version__"),
    ],
)
def test_what_core_may_import(module, source):
    assert core_faults({module: source}) == []


@pytest.mark.parametrize(
    "source",
    [
        "from specdec_core.engine.scheduler import Scheduler",
        "import specdec_core.contracts.draft",
        "from specdec_core.contracts.draft import _offsets",
        "def build():\n    from specdec_proposer_other import helper",
    ],
)
def test_a_fault_in_a_proposer_is_noticed(source):
    assert len(faults_outside({"specdec_proposer_mine.build": source})) == 1


def test_what_a_proposer_may_import():
    source = (
        "from specdec_core import Draft\nfrom specdec_core.contracts.proposer import ProposerSpec\nfrom . import rest\n"
    )
    assert faults_outside({"specdec_proposer_mine.__init__": source + "import specdec_proposer_mine.rest"}) == []
