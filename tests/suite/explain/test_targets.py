"""Names on the command line become targets, and errors in users' programs name the fix."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from models import registry
from models.own_program import WrongProgram, load
from suite.explain.targets import Target, find_targets

PROGRAMS = Path(__file__).parents[2] / "support"


@pytest.fixture(autouse=True)
def in_the_programs_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROGRAMS)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_no_name_means_every_workload_in_each_variant() -> None:
    targets = find_targets(())
    assert {target.name for target in targets} == set(registry.workloads())
    mmc = [target.variant for target in targets if target.name == "MMC"]
    assert mmc == list(registry.find("MMC").variants)


def test_names_are_found_in_any_case_and_once() -> None:
    assert find_targets(["mmc", "MMC"]) == [Target("MMC", "published")]
    assert find_targets(["explain_programs:mask_attribute"]) == [Target("explain_programs:mask_attribute", None)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:make", "no module 'no_such_module'; run from the folder"),
        ("broken_program:make", "importing broken_program failed: No module named 'no_such_dependency'"),
        ("explain_programs:mask_atribute", "no 'mask_atribute'; did you mean mask_attribute"),
        ("explain_programs:not_callable", "is of type int, not callable"),
        ("explain_programs:returns_a_number", "returned int; it must return"),
        ("explain_programs:ready_made", "exists already"),
    ],
)
def test_programs_that_cannot_be_loaded_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (tmp_path / "broken_program.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(WrongProgram, match=message):
        load(name)()


@pytest.mark.parametrize(
    ("name", "keywords"), [("mask_attribute", set()), ("WithExampleInputs", set()), ("with_keywords", {"scale"})]
)
def test_program_may_return_allowed_types(name: str, keywords: set[str]) -> None:
    made = load(f"explain_programs:{name}")()
    assert callable(made.call)
    assert [(len(inputs.args), set(inputs.kwargs)) for inputs in made.sets] == [(1, keywords)]
