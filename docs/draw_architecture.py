"""Draws docs/architecture.md from the code: packages, modules with the first sentence of their docstrings, imports.

python docs/draw_architecture.py           writes the page
python docs/draw_architecture.py --check   exit code 1 if the page is not what it would write
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("encore", "optimizations", "models", "suite", "host_tuning")


def page() -> str:
    """The text of the page."""
    parts = [
        "# Architecture\n\n"
        "Drawn from the code by `python docs/draw_architecture.py`; a test compares the two. An arrow leads from a\n"
        "package to one that it imports. The reasons are in the design pages:\n"
        "[optimizations](../optimizations/DESIGN.md), [suite](../suite/DESIGN.md).\n"
    ]
    for package in PACKAGES:
        modules = dict(_modules(package))
        parts.append(f"\n## {package}\n\n{_sentence(modules.get(f'{package}/__init__.py'))}\n")
        arrows = _arrows(package, modules)
        if arrows:
            lines = "\n".join(f"    {source} --> {target}" for source, target in arrows)
            parts.append(f"\n```mermaid\nflowchart TD\n{lines}\n```\n")
        rows = "\n".join(
            f"| `{name}` | {_sentence(tree)} |" for name, tree in modules.items() if not name.endswith("__init__.py")
        )
        parts.append(f"\n| module | what it is |\n| --- | --- |\n{rows}\n")
    return "".join(parts)


def _modules(package: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def _sentence(tree: ast.Module | None) -> str:
    """The first sentence of a module's docstring."""
    text = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split()) if tree is not None else ""
    end = re.search(r"(?<!Fig)\. ", text)
    return (text if end is None else text[: end.start() + 1]).replace("|", "\\|")


def _arrows(package: str, modules: dict[str, ast.Module]) -> list[tuple[str, str]]:
    """Imports between the parts (sub-packages, and modules at the top) of one package."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, tree in modules.items():
        source = _part(name.removesuffix(".py").split("/"))
        for node in ast.walk(tree):
            for module in _imported(node):
                parts = module.split(".")
                if parts[0] == package and len(parts) > 1 and parts[1] != source and source != "__init__":
                    found[source].add(parts[1])
    known = {_part(name.removesuffix(".py").split("/")) for name in modules}
    return [(source, target) for source in sorted(found) for target in sorted(found[source] & known)]


def _part(path: list[str]) -> str:
    return path[1]


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    given = parser.parse_args()
    text = page()
    if not given.check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is not what the code gives; run python docs/draw_architecture.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
