"""Explanations are reused for the same commit only."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from fixtures.synthetic_results import explanation

from suite.explain import run
from suite.explain.run import file_name
from suite.explain.targets import Target

EOS, ST = Target("EOS", "published"), Target("ST", "current")
OWN = Target("mine:make", None)
HERE = {"commit": "abc", "dirty": False, "torch": version("torch")}


@pytest.mark.parametrize(
    ("changes", "state", "target", "kept"),
    [
        ({}, ("abc", False), EOS, True),
        ({}, ("abc", True), EOS, False),
        ({"dirty": True}, ("abc", False), EOS, False),
        ({}, ("def", False), EOS, False),
        ({"error": "it crashed"}, ("abc", False), EOS, False),
        ({"torch": "2.0"}, ("abc", False), EOS, False),
        ({"size": "tiny"}, ("abc", False), EOS, False),
        ({}, ("abc", False), OWN, False),
    ],
)
def test_explanation_of_this_commit_is_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    state: tuple[str, bool],
    target: Target,
    kept: bool,
) -> None:
    monkeypatch.setattr(run, "git_state", lambda repository: state)
    found = explanation(target.name).model_copy(update={**HERE, **changes})
    (tmp_path / file_name(target)).write_text(found.model_dump_json())
    (tmp_path / file_name(ST)).write_text("{}")
    assert run.reusable([target, ST], tmp_path) == ({target: found} if kept else {})
