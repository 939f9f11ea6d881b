"""Bytecode that is written ahead is what pytest takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from rewritten_ahead import compiled, files_with_tests, write_ahead

REPOSITORY = Path(__file__).resolve().parents[2]


def test_what_is_written_ahead_is_taken(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    files = [tmp_path / f"test_{number}.py" for number in range(5)]
    for number, file in enumerate(files):
        file.write_text(f"def test_it():\n    found = {number}\n    assert found == 9\n")
    files[0].write_text("def (")
    write_ahead(files, pytestconfig)
    assert not compiled(files[0]).exists()
    for number, file in enumerate(files[1:], start=1):
        code = rewrite._read_pyc(file, compiled(file))
        assert code is not None, "as pytest reads it"
        module: dict[str, object] = {}
        exec(code, module)  # noqa: S102
        with pytest.raises(AssertionError, match=f"assert {number} == 9"):
            module["test_it"]()  # type: ignore[operator]
    files[1].write_text("changed = True\n")
    assert rewrite._read_pyc(files[1], compiled(files[1])) is None


def test_files_are_those_of_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").touch()
    (tmp_path / "helper.py").touch()
    assert files_with_tests([str(tmp_path), "tests/test_two.py::test_it[x]"]) == [
        tmp_path / "test_one.py",
        Path("tests/test_two.py"),
    ]


def test_no_file_with_tests_is_compiled_twice() -> None:
    (pattern,) = re.findall(r"compileall .*-x '(.*)'", (REPOSITORY / "run_tests.sh").read_text())
    assert re.search(pattern, "tests/suite/cli/test_cli.py") and not re.search(pattern, "tests/conftest.py")
