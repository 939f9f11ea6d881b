"""The mutation script: its changes are changes, its list is up to date, and it tells survivors from the rest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import mutants
import run as mutation
from mutants import NAMED, Named


@pytest.mark.parametrize("named", NAMED, ids=lambda named: f"{named.file}: {named.new[:30]}")
def test_named_mutants_stand_in_their_file_once_and_compile(named: Named) -> None:
    compile(named.text(), named.file, "exec")
    assert named.text() != (mutants.REPOSITORY / named.file).read_text(encoding="utf-8")
    assert all((mutants.REPOSITORY / test).is_file() for test in named.tests)


@pytest.mark.parametrize(("new", "verdict"), [("a - b", "killed"), ("b + a", "survived")])
def test_a_change_that_a_test_notices_is_killed(tmp_path: Path, new: str, verdict: str) -> None:
    (tmp_path / "adding.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_adding.py").write_text("from adding import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n")
    assert mutation.judge(tmp_path, Named("adding.py", "a + b", new, ("test_adding.py",))) == verdict
    assert "a + b" in (tmp_path / "adding.py").read_text(), "the copy is as it was"
