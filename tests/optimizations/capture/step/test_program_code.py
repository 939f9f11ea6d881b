"""Whose code it is that a step runs: the program's own, or an installed library's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimizations.capture.step.program_code import is_users_file


def installed(folder: Path, package: str) -> None:
    """As `pip install --target` leaves it."""
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text("")
    (folder / f"{package}.py").write_text("")  # Python 3.12 leaves out files that are not there
    described = folder / f"{package}-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (described / "RECORD").write_text(f"{package}/__init__.py,,\n{package}.py,,\n../bin/{package},,\n")


def test_what_was_installed_into_a_folder_of_its_own_is_a_librarys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(tmp_path, "somelibrary")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not is_users_file(str(tmp_path / "somelibrary" / "deep" / "module.py"))
    assert not is_users_file(str(tmp_path / "somelibrary.py"))
    assert is_users_file(str(tmp_path / "training.py"))  # the program may stand beside it
    assert is_users_file(str(tmp_path / "somelibrary_of_mine" / "module.py"))
    assert is_users_file(str(tmp_path.parent / "elsewhere" / "somelibrary" / "module.py"))


def test_a_program_that_is_worked_on_as_a_package_is_the_programs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    described = tmp_path / "training.egg-info"
    described.mkdir()
    (described / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: training\nVersion: 1.0\n")
    (described / "SOURCES.txt").write_text("training/__init__.py\n")
    (described / "top_level.txt").write_text("training\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_users_file(str(tmp_path / "training" / "__init__.py"))


def test_python_and_what_pip_installs_are_no_programs() -> None:
    assert not is_users_file(json.__file__) and not is_users_file(pytest.__file__)
    assert is_users_file(__file__)
