"""Imports of Encore's modules, and of tests' own, in tests exist, also inside of functions that run on a GPU only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from suite.results.store import REPOSITORY

TESTS = REPOSITORY / "tests"
ROOTS = (REPOSITORY, TESTS, TESTS / "support", TESTS / "gpu")
PACKAGES = ("encore", "host_tuning", "models", "optimizations", "suite", "tests", "simulated_gpu", "fixtures")


def source_of(module: str) -> Path | None:
    paths = [root / module.replace(".", "/") for root in ROOTS]
    candidates = (file for path in paths for file in (path / "__init__.py", path.with_suffix(".py")))
    return next((one for one in candidates if one.is_file()), None)


def is_own(module: str) -> bool:
    top = module.partition(".")[0]
    return top in PACKAGES or any((root / f"{top}.py").is_file() for root in ROOTS[1:])


@cache
def names_in(source: Path) -> set[str]:
    """Names that a module may have: defined, assigned or imported, and words that a lazy `__getattr__` may know."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        match node:
            case (
                ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name) | ast.Constant(value=str(name))
            ):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {alias.asname or alias.name.partition(".")[0] for alias in names}
    return found


def missing(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                wanted = [(alias.name, None) for alias in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                wanted = [(module, alias.name) for alias in names]
            case _:
                continue
        for module, name in wanted:
            if not is_own(module):
                continue
            source = source_of(module)
            is_there = source is not None and (name is None or name in names_in(source))
            if not is_there and (name is None or source_of(f"{module}.{name}") is None):
                yield f"{path}:{node.lineno}: {module} {name or ''}"


def test_imports_of_all_tests_exist() -> None:
    assert [line for path in sorted((REPOSITORY / "tests").rglob("*.py")) for line in missing(path)] == []
