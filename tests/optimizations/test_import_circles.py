"""No modules of the backend import each other in a circle, in functions or under TYPE_CHECKING either."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
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


def circle(imports: Mapping[str, Iterable[str]]) -> Sequence[str]:
    """Return modules that import each other in a circle; none where there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found: Sequence[str] = error.args[1]
        return found
    return ()


def test_circles_are_found() -> None:
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == ()


def test_backend_has_no_circle_of_imports() -> None:
    found = modules(ROOT)
    assert circle({name: imported(path, found) for name, path in found.items()}) == ()
