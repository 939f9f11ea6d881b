"""Imports without circles, and the one place for private PyTorch names. Linters check the directions of imports."""

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


def test_suite_reads_public_names_of_the_backend() -> None:
    """Linters check which of its modules it imports."""
    modules = {path.stem for path in (REPOSITORY / "optimizations").iterdir()}
    found: set[str] = set()
    for path in (REPOSITORY / "suite").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.ImportFrom(module="optimizations", names=names):
                    found |= {alias.name for alias in names}
                case ast.Attribute(value=ast.Name(id="optimizations"), attr=name):
                    found.add(name)
    assert "report" in found
    assert found - modules <= set(optimizations.__all__)


def test_backend_has_no_circle_of_imports() -> None:
    """Imports inside of functions count."""
    import grimp  # linters need it, tests in other versions of PyTorch do not have it

    found = grimp.build_graph("optimizations", cache_dir=None)
    TopologicalSorter({name: found.find_modules_directly_imported_by(name) for name in found.modules}).prepare()
