"""A checkout's code has an id, and computing it does not change the checkout."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from suite.measure.environment import code_id, git_state, shown_code

ALONE = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **ALONE}).stdout


def commit(folder: Path) -> str:
    """Commit what is there, changed or not, and return the commit."""
    git(folder, "add", "-A")
    git(folder, "commit", "--allow-empty", "-qm", "more")
    return git(folder, "rev-parse", "HEAD").strip()


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout with a part of what counts as code."""
    folder = tmp_path / "my: clone"
    (folder / "suite" / "report").mkdir(parents=True)
    (folder / "suite" / "code.py").write_text("1\n")
    (folder / "suite" / "report" / "größe.py").write_text("2\n")
    (folder / "pyproject.toml").write_text("[project]\n")
    (folder / "README.md").write_text("read\n")
    (folder / ".gitignore").write_text("__pycache__/\n")
    git(folder, "init")
    commit(folder)
    return folder


@pytest.mark.parametrize(
    ("path", "text", "is_code"),
    [
        ("suite/code.py", "3\n", True),
        ("models/new.py", "4\n", True),
        ("pyproject.toml", None, True),
        ("README.md", "other words\n", False),
        ("suite/__pycache__/code.pyc", "compiled", False),
    ],
)
def test_code_id_changes_with_the_code_and_not_by_a_commit(
    repository: Path, path: str, text: str | None, is_code: bool
) -> None:
    before = code_id(repository)
    assert shown_code(before) == before[:12]
    (repository / path).parent.mkdir(exist_ok=True)
    if text is None:
        (repository / path).unlink()
    else:
        (repository / path).write_text(text)
    found = code_id(repository)
    assert (git_state(repository)[1], found != before) == (is_code, is_code)
    commit(repository)
    assert git_state(repository)[1] is False and code_id(repository) == found


def test_state_of_git_is_not_known_without_a_checkout(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert git_state(tmp_path) == git_state(repository / "suite") == (None, None)
    git(tmp_path, "init", "empty")
    assert git_state(tmp_path / "empty") == (None, None)
    index = (repository / ".git" / "index").read_bytes()
    os.utime(repository / "README.md", (1, 1))  # `git status` would take this up into the index
    assert git_state(repository)[1] is False
    assert (repository / ".git" / "index").read_bytes() == index
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(repository) == (None, None)


def test_dirty_is_about_code_and_not_about_figures(repository: Path) -> None:
    head, dirty = git_state(repository)
    assert (len(head or ""), dirty) == (40, False)
    (repository / "figures").mkdir()
    (repository / "figures" / "new.png").write_text("drawn")
    assert git_state(repository) == (head, False)
    (repository / "suite" / "more.py").write_text("2")
    assert git_state(repository) == (head, True)
