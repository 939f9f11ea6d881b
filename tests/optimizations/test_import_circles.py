"""No module of the backend knows one that knows it, counting imports in functions and under TYPE_CHECKING."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

PACKAGE = "optimizations"
ROOT = Path(__file__).resolve().parents[2] / PACKAGE


def modules(root: Path) -> dict[str, Path]:
    """Return the files of the package by the names of their modules."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: Iterable[str]) -> set[str]:
    """Return the modules among `known` that a file imports anywhere in it.

    `from package import name` imports the module `package.name` if there is one, and else the package itself.
    """
    names = set(known)
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(one.name for one in node.names if one.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            for one in node.names:
                inner = f"{node.module}.{one.name}"
                found.update({inner} if inner in names else {node.module} & names)
    return found


def circles(imports: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Return the groups of modules in which each leads to each other, by Tarjan's method."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in imports[name]:
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            group = frozenset(stack[stack.index(name) :])
            del stack[stack.index(name) :]
            if len(group) > 1 or name in imports[name]:
                found.add(group)

    for name in imports:
        if name not in order:
            visit(name)
    return found


def test_circles_are_found(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    texts = {
        "__init__": "",
        "late": "def f():\n    import package.typed\n",
        "typed": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package import late\n",
        "plain": "from package.late import f\n",
    }
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    files = modules(package)
    found = circles({name: imported(path, files) for name, path in files.items()})
    assert found == {frozenset({"package.late", "package.typed"})}


def test_backend_has_no_circle_of_imports() -> None:
    files = modules(ROOT)
    found = circles({name: imported(path, files) for name, path in files.items()})
    assert not found, f"modules that know each other: {[sorted(one) for one in found]}"
