"""A checkout's code has an id that anyone can repeat with git, and finding it out leaves the checkout as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from suite.measure import checkout
from suite.measure.checkout import code_id, git_state, shown_code
from suite.results.store import REPOSITORY

SHELL_LINE = "git ls-tree -r {commit} -- encore suite models optimizations pyproject.toml requirements.lock | sha256sum"
"""As the documentation has it."""


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


def git(folder: Path, *arguments: str, check: bool = True) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=check, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout with a part of what counts as code, in a folder with a name that git would have to quote."""
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


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-m", "more")


def by_shell(folder: Path, commit: str = "HEAD") -> str:
    command = ["bash", "-c", SHELL_LINE.format(commit=commit)]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.split()[0]


def change_line(folder: Path) -> None:
    (folder / "suite" / "code.py").write_text("3\n")


def add_file(folder: Path) -> None:
    (folder / "models").mkdir()
    (folder / "models" / "new.py").write_text("4\n")


def remove_file(folder: Path) -> None:
    (folder / "pyproject.toml").unlink()


def make_executable(folder: Path) -> None:
    (folder / "suite" / "code.py").chmod(0o755)


def file_to_folder(folder: Path) -> None:
    (folder / "suite" / "code.py").unlink()
    (folder / "suite" / "code.py").mkdir()
    (folder / "suite" / "code.py" / "inner.py").write_text("5\n")


def stage_what_is_ignored(folder: Path) -> None:
    (folder / "suite" / "__pycache__").mkdir()
    (folder / "suite" / "__pycache__" / "kept.py").write_text("6\n")
    git(folder, "add", "--force", "suite/__pycache__/kept.py")


def stage_and_change(folder: Path) -> None:
    change_line(folder)
    git(folder, "add", "-A")
    (folder / "suite" / "code.py").write_text("7\n")


CHANGES = (
    change_line,
    add_file,
    remove_file,
    make_executable,
    file_to_folder,
    stage_what_is_ignored,
    stage_and_change,
)


def test_the_id_of_a_clean_tree_is_what_the_shell_line_prints(repository: Path) -> None:
    assert code_id(repository) == by_shell(repository)
    assert shown_code(code_id(repository)) == by_shell(repository)[:12]
    assert SHELL_LINE.split()[5:-2] == list(checkout.CODE)
    for page in ("docs/running.md", "suite/measure/checkout.py"):
        assert SHELL_LINE.format(commit="COMMIT") in (REPOSITORY / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("change", CHANGES)
def test_checkout_id_of_a_changed_tree_is_that_of_its_commit(repository: Path, change: Callable[[Path], None]) -> None:
    before = code_id(repository)
    change(repository)
    found = code_id(repository)
    assert git_state(repository)[1] is True
    assert found is not None and found != before
    commit(repository)
    assert git_state(repository)[1] is False
    assert (code_id(repository), by_shell(repository)) == (found, found)
    assert by_shell(repository, "HEAD~1") == before


def test_what_is_not_code_changes_no_id(repository: Path) -> None:
    before = code_id(repository)
    for change in (lambda folder: None, change_line):
        change(repository)
        with_code = code_id(repository)
        (repository / "README.md").write_text("other words\n")
        (repository / "results").mkdir(exist_ok=True)
        (repository / "results" / "rows.jsonl").write_text("{}\n")
        (repository / "suite" / "__pycache__").mkdir(exist_ok=True)
        (repository / "suite" / "__pycache__" / "code.pyc").write_bytes(b"compiled")
        assert code_id(repository) == with_code
    assert with_code != before
    commit(repository)
    (repository / "README.md").write_text("newer words\n")
    commit(repository)
    assert code_id(repository) == with_code


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of a folder with its content and time."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_index_and_objects_of_the_checkout_stay_as_they_are(repository: Path) -> None:
    stage_and_change(repository)
    (repository / "suite" / "new.py").write_text("8\n")
    os.utime(repository / "README.md", (1, 1))  # `git status` would take this up into the index
    before = contents(repository / ".git")
    found = code_id(repository)
    after = contents(repository / ".git")
    assert found is not None and after.keys() == before.keys()
    # That git marks an object that it already has as still in use changes its time only.
    assert {name: kept[0] for name, kept in after.items()} == {name: kept[0] for name, kept in before.items()}
    assert after[str(repository / ".git" / "index")] == before[str(repository / ".git" / "index")]
    assert git(repository, "status", "--porcelain") == "MM suite/code.py\n?? suite/new.py\n"


@pytest.mark.parametrize("setting", ["core.autocrlf=true", "core.quotePath=false", "status.showUntrackedFiles=no"])
def test_settings_of_a_user_change_no_id(repository: Path, setting: str) -> None:
    clean = code_id(repository)
    add_file(repository)
    changed = code_id(repository)
    shutil.rmtree(repository / "models")
    git(repository, "config", *setting.split("="))
    assert code_id(repository) == clean
    add_file(repository)
    if "crlf" in setting:
        (repository / "models" / "new.py").write_bytes(b"4\r\n")
    assert code_id(repository) == changed


def test_checkout_id_exists_in_worktrees_and_borrowing_clones(repository: Path, tmp_path: Path) -> None:
    git(repository, "worktree", "add", str(tmp_path / "tree"))
    git(tmp_path, "clone", "--shared", str(repository), str(tmp_path / "borrowing"))
    for folder in (repository, tmp_path / "tree", tmp_path / "borrowing"):
        assert code_id(folder) == by_shell(repository)
        change_line(folder)
    assert len({code_id(folder) for folder in (repository, tmp_path / "tree", tmp_path / "borrowing")}) == 1
    assert code_id(repository) != by_shell(repository)


def test_without_git_or_a_checkout_of_its_own_there_is_no_id(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (git_state(tmp_path), code_id(tmp_path)) == ((None, None), None)
    assert (git_state(repository / "suite"), code_id(repository / "suite")) == ((None, None), None)
    git(tmp_path, "init", "empty")
    assert code_id(tmp_path / "empty") is None
    change_line(repository)
    with monkeypatch.context() as other_user:
        other_user.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
        assert (git_state(repository), code_id(repository)) == ((None, None), None)
    assert code_id(repository) is not None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (git_state(repository), code_id(repository)) == ((None, None), None)


def test_what_git_cannot_record_has_no_id_and_is_no_error(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(repository, "branch", "-M", "ours")
    for branch in ("theirs", "ours"):
        git(repository, "checkout", "-B", branch, "ours")
        (repository / "README.md").write_text(f"{branch}\n")
        commit(repository)
        git(repository, "checkout", "ours")
    git(repository, "merge", "theirs", check=False)
    assert git(repository, "status", "--porcelain") == "UU README.md\n"
    assert code_id(repository) == by_shell(repository), "code that nothing is merged into"
    add_file(repository)
    assert code_id(repository) is None
    git(repository, "reset", "--merge")
    assert code_id(repository) is not None

    def full(*arguments: object, **options: object) -> object:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkout.tempfile, "TemporaryDirectory", full)
    assert code_id(repository) is None


def test_dirty_is_about_code_and_not_about_figures(repository: Path) -> None:
    head, dirty = git_state(repository)
    assert (len(head or ""), dirty) == (40, False)
    (repository / "figures").mkdir()
    (repository / "figures" / "new.png").write_text("drawn")
    assert git_state(repository) == (head, False)
    (repository / "suite" / "more.py").write_text("2")
    assert git_state(repository) == (head, True)
