"""The check of the release gate: rows of the README are of the tree's version and of nearly its code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fixtures.fake_command import run_command
from fixtures.synthetic_results import cell, environment, write_run

from suite.report import markdown_pages
from suite.report.markdown_pages import commits_since, stale_rows
from suite.results import store
from suite.results.errors import WrongUse
from tests.suite.measure.test_checkout import commit, git

PAGE = "<!-- generated: headline -->\n{text}\n<!-- end: headline -->\n"


def changed(folder: Path, file: str) -> str:
    """Change a file of the checkout, and return the commit."""
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{path.read_text() if path.exists() else ''}more\n")
    return commit(folder)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout of version 0.2.0 with a recorded run of its first commit, and a page whose table names that run."""
    folder = tmp_path / "tree"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "pyproject.toml").write_text('[project]\nname = "encore"\nversion = "0.2.0"\n')
    first = changed(folder, "optimizations/a.py")
    of = environment(run_id="new", git_commit=first, packages={"encore": "0.2.0"})
    write_run(folder / "recorded" / "new", [cell("EOS", "compile")], of)
    (folder / "README.md").write_text(PAGE.format(text=f"NVIDIA H200, run new (commit {first[:10]} with code abc)"))
    return folder


def stale(tree: Path) -> list[str]:
    return stale_rows(tree / "README.md", tree / "recorded", tree)


@pytest.mark.parametrize(
    ("version", "code", "words"),
    [("0.2.0", 0, "are fresh"), ("0.3.0", 1, "1 findings; measure.*new is of version 0.2.0, and the tree is 0.3.0")],
)
def test_rows_of_another_version_are_stale(
    tree: Path, monkeypatch: pytest.MonkeyPatch, version: str, code: int, words: str
) -> None:
    monkeypatch.setattr(store, "REPOSITORY", tree)
    monkeypatch.setattr(store, "RECORDED", tree / "recorded")
    (tree / "pyproject.toml").write_text(f'[project]\nname = "encore"\nversion = "{version}"\n')
    done = run_command(("report", "--check-fresh"))
    assert done.returncode == code
    assert re.search(words, done.stdout + done.stderr, re.DOTALL)


def test_rows_many_commits_old_are_stale(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits that leave the backend as it is do not count."""
    monkeypatch.setattr(markdown_pages, "MOST_COMMITS", 1)
    changed(tree, "optimizations/a.py")
    changed(tree, "docs/a.md")
    assert stale(tree) == []
    changed(tree, "optimizations/b.py")
    (found,) = stale(tree)
    assert found.startswith("2 commits touched optimizations/ since run new (") and found.endswith("; 1 may")


def test_rows_of_an_unknown_commit_or_run_are_stale(tree: Path) -> None:
    (tree / "README.md").write_text(PAGE.format(text=f"run new (commit {'0' * 10})"))
    assert stale(tree) == [f"run new is of commit {'0' * 10}, which this checkout does not have"]
    (tree / "README.md").write_text(PAGE.format(text=f"run other (commit {'0' * 10})"))
    assert stale(tree) == ["run other is not recorded, so that its version is not known"]
    assert commits_since(tree / "recorded" / "none", "0" * 10) is None


def test_page_whose_table_names_no_run_is_wrong_use(tree: Path) -> None:
    (tree / "README.md").write_text(PAGE.format(text="no table yet"))
    with pytest.raises(WrongUse, match="names no run; renew it with"):
        stale(tree)
    with pytest.raises(FileNotFoundError):
        stale_rows(tree / "none.md", tree / "recorded", tree)
