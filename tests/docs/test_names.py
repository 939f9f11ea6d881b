"""Names of tests are short enough to be read in a list of failures."""

from __future__ import annotations

import ast

from suite.results.store import REPOSITORY

MOST_CHARACTERS = 60
STILL_LONGER = 33
"""How many names may still be longer. Lower it with each change that renames some, to 0 at the end."""


def test_few_names_of_tests_are_longer_than_allowed() -> None:
    longer = [
        f"{path.relative_to(REPOSITORY)}: {node.name}"
        for path in sorted((REPOSITORY / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > MOST_CHARACTERS
    ]
    assert len(longer) <= STILL_LONGER, "\n".join(longer)
