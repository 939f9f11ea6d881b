"""Explanations are kept while the code that made them stands, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.synthetic_results import explanation

from suite.explain import run
from suite.explain.run import file_name
from suite.explain.targets import Target

EOS, ST = Target("EOS", "published"), Target("ST", "current")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run, "code_digest", lambda: "this code")
    assert run.reusable([EOS, ST], tmp_path) == {}
    (tmp_path / file_name(EOS)).write_text(explanation("EOS").model_dump_json())
    return tmp_path


def test_what_this_code_explained_is_kept_and_the_rest_is_to_do(folder: Path) -> None:
    assert run.reusable([EOS, ST], folder) == {EOS: explanation("EOS")}


@pytest.mark.parametrize("text", [explanation("EOS", error="it crashed").model_dump_json(), "", "{}"])
def test_a_failed_or_broken_explanation_is_made_again(folder: Path, text: str) -> None:
    (folder / file_name(EOS)).write_text(text)
    assert run.reusable([EOS, ST], folder) == {}


def test_another_state_of_the_code_removes_what_is_stale(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "code_digest", lambda: "other code")
    (folder / "notes.txt").write_text("mine")
    assert run.reusable([EOS, ST], folder) == {}
    assert not (folder / file_name(EOS)).exists()
    assert (folder / "notes.txt").exists()


def test_another_size_is_another_explanation(folder: Path) -> None:
    assert run.reusable([Target("EOS", "published", "tiny")], folder) == {}


@pytest.mark.parametrize("name", ["mine:make", "torchbench:alexnet"])
def test_programs_whose_code_is_elsewhere_are_always_explained(folder: Path, name: str) -> None:
    program = Target(name, None)
    (folder / file_name(program)).write_text(explanation(name).model_dump_json())
    assert run.reusable([program], folder) == {}


def test_the_digest_changes_with_any_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "REPOSITORY", tmp_path)
    source = tmp_path / "models" / "deep" / "network.py"
    source.parent.mkdir(parents=True)
    source.write_text("one")
    before = run.code_digest()
    assert run.code_digest() == before
    source.write_text("two")
    assert run.code_digest() != before
