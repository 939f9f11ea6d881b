"""The design's imports, without circles, and the one place for private PyTorch names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import optimizations
from optimizations import torch_internals
from suite.results.store import REPOSITORY

SOURCES = sorted(
    path
    for package in ("suite", "models", "optimizations", "host_tuning")
    for path in (REPOSITORY / package).rglob("*.py")
)
BACKEND = REPOSITORY / "optimizations"


def private_torch_names(path: Path) -> Iterator[str]:
    """Names like `torch._dynamo` or `torch.cuda._x` that a source reaches: imported, or as an attribute of torch."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                dotted = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                dotted = [f"{module}.{alias.name}" for alias in names]
            case ast.Attribute():
                dotted = [_dotted(node)]
            case _:
                continue
        for name in dotted:
            root, *parts = name.split(".")
            if root == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts):
                yield f"{path.relative_to(path.parents[1])}:{node.lineno}: {name}"


def _dotted(node: ast.expr) -> str:
    """`a.b.c` for a chain of names, nothing for an attribute of anything else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute) if prefix := _dotted(value):
            return f"{prefix}.{attribute}"
    return ""


def test_private_torch_names_are_reached_through_the_table_alone() -> None:
    found = [name for path in SOURCES for name in private_torch_names(path)]
    assert found == []


@pytest.mark.parametrize("name", sorted(torch_internals.NAMES))
def test_every_private_name_resolves(name: str) -> None:
    assert torch_internals.resolve(name) is not None


CONSTRUCTORS = frozenset(
    (
        *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint"),
        *("randn", "randperm", "scalar_tensor", "tensor", "zeros"),
    )
)


def constructors_without_a_device(path: Path) -> Iterator[str]:
    """Calls such as `torch.empty(3)`: inside of the program's calls its default device decides where they lie."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), keywords=keywords):
                if name in CONSTRUCTORS and "device" not in {keyword.arg for keyword in keywords}:
                    yield f"{path.name}:{node.lineno}: torch.{name}"


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    ours = [path for path in SOURCES if path.is_relative_to(REPOSITORY / "optimizations")]
    assert not [found for path in ours for found in constructors_without_a_device(path)]


UTILITY = "a plain utility without torch"
REPORTED = "records and source lines of the public report"
PRIVATE_NAMES = "the one place for private PyTorch names"

BACKEND_OF_SUITE: dict[str, tuple[str, str]] = {
    "atomic_file": ("suite", UTILITY),
    "byte_units": ("suite", UTILITY),
    "uncollected": ("suite", UTILITY),
    "report": ("suite", REPORTED),
    "report.concurrency": ("suite/draw", REPORTED),
    "report.recordings": ("suite", REPORTED),
    "stack_trace": ("suite", REPORTED),
    "torch_internals": ("suite", PRIVATE_NAMES),
    "torch_internals.outcome": ("suite", PRIVATE_NAMES),
    "torch_internals.tuning": ("suite", PRIVATE_NAMES),
    "placement": ("suite/explain", "explain shows what the backend's own analysis finds"),
    "in_place.generated": ("suite/explain", "explain reads generated code as the backend does"),
    "trees.containers": ("suite/measure", "live graphs are counted as stock's are"),
}
"""Modules of the backend that the suite may import besides its public names: in which folder, and why. `suite/micro`
measures parts of the backend alone, and imports those."""


def backend_modules(path: Path) -> Iterator[str]:
    """Names of the backend's modules that a source imports; of public names that it reads, "" and the name."""
    public = set(optimizations.__all__)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module=str(module), names=names, level=0) if f"{module}.".startswith("optimizations."):
                inner = module.partition(".")[2]
                for alias in names:
                    dotted = f"{inner}.{alias.name}".strip(".")
                    is_module = (BACKEND / f"{dotted.replace('.', '/')}.py").exists() or (
                        BACKEND / dotted.replace(".", "/") / "__init__.py"
                    ).exists()
                    if is_module or dotted not in public:
                        yield dotted if is_module else inner
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[2] for alias in names if alias.name.startswith("optimizations."))
            case ast.Attribute(value=ast.Name(id="optimizations"), attr=name) if name not in public:
                yield name


def test_suite_reads_public_functions_of_the_backend() -> None:
    """And of other modules those that are listed, each with its reason."""
    unlisted, used = [], set()
    for path in sorted((REPOSITORY / "suite").rglob("*.py")):
        for module in backend_modules(path) if path.parent.name != "micro" else ():
            folder = BACKEND_OF_SUITE.get(module, ("-", ""))[0]
            used.add(module)
            if not path.is_relative_to(REPOSITORY / folder):
                unlisted.append(f"{path.relative_to(REPOSITORY)}: optimizations.{module}")
    assert unlisted == [], "use a public name of `encore`, or list the module with its reason"
    assert used == BACKEND_OF_SUITE.keys(), "what is not used any more is not listed"


def test_backend_has_no_circle_of_imports() -> None:
    """Imports inside of functions count."""
    import grimp  # linters need it, tests in other versions of PyTorch do not have it

    found = grimp.build_graph("optimizations", cache_dir=None)
    TopologicalSorter({name: found.find_modules_directly_imported_by(name) for name in found.modules}).prepare()
