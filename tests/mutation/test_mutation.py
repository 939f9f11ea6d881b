"""The mutation script: its changes are changes, its list is up to date, and it tells survivors from the rest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import mutants
import run as mutation
from mutants import NAMED, Mutant, Named


@pytest.mark.parametrize("named", NAMED, ids=lambda named: f"{named.file}: {named.new[:30]}")
def test_named_mutants_stand_in_their_file_once_and_compile(named: Named) -> None:
    mutant = named.mutant()
    compile(mutant.text, named.file, "exec")
    assert mutant.text != mutant.path.read_text(encoding="utf-8")
    assert all((mutants.REPOSITORY / test).is_file() for test in named.tests)


@pytest.mark.parametrize(("new", "verdict"), [("a - b", "killed"), ("b + a", "survived")])
def test_a_change_that_a_test_notices_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: str, verdict: str
) -> None:
    monkeypatch.setattr(mutation, "REPOSITORY", tmp_path)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "adding.py").write_text("def add(a, b):\n    return a + b\n")
    (copy / "test_adding.py").write_text("from adding import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n")
    mutant = Mutant(tmp_path / "adding.py", 2, "a + b", new, f"def add(a, b):\n    return {new}\n")
    assert mutation.judge(copy, mutant, ["test_adding.py"]) == verdict
    assert "a + b" in (copy / "adding.py").read_text(), "the copy is as it was"
    assert mutation.judge(copy, mutant, []) == "no tests"
