"""Names of tests are short enough to be read in a list of failures."""

from __future__ import annotations

import ast
import re

from suite.results.store import REPOSITORY

MOST_CHARACTERS = 60


def test_no_name_of_a_test_is_longer_than_allowed() -> None:
    longer = [
        f"{path.relative_to(REPOSITORY)}: {node.name}"
        for path in sorted((REPOSITORY / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > MOST_CHARACTERS
    ]
    assert longer == []


def test_files_of_tests_that_are_named_exist() -> None:
    tests = REPOSITORY / "tests"
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md"), *REPOSITORY.glob("*/DESIGN.md")]
    named = {
        REPOSITORY / name
        for path in (
            *pages,
            REPOSITORY / "run_tests.sh",
            tests / "gpu" / "pytest.sh",
            tests / "mutation" / "mutants.py",
        )
        if path.name != "CHANGELOG.md"
        for name in re.findall(r"(?<![\w/])tests/[\w/]+\.(?:py|sh)", path.read_text(encoding="utf-8"))
    }
    named |= {tests / name for name in re.findall(r'"([\w/]*test_\w+\.py)"', (tests / "conftest.py").read_text())}
    files = re.findall(r"^files=\((.*?)\)", (tests / "versions.sh").read_text(), re.DOTALL | re.MULTILINE)[0].split()
    named |= {tests / f"{name}.py" for name in files}
    assert len(named) > len(files) > 10
    assert sorted(str(path) for path in named if not path.is_file()) == []
