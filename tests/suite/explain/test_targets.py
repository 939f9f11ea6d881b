"""Names on the command line become targets, and errors in users' programs name the fix."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from models import registry
from models.own_program import WrongProgram, load
from suite.explain.targets import Target, find_targets
from suite.results.errors import WrongUse

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
    ("names", "variant", "message"),
    [
        (["MMX"], None, "unknown workload 'MMX'.*MMC"),
        (["MMC"], "newest", "unknown variant 'newest'.*published, current"),
        (["my_model"], None, "; a program of your own is named with its function: my_model:make$"),
        (["my_model.py"], None, "named with its function: my_model:make$"),
        (["a b:make"], None, "not a module:callable"),
        (["module:"], None, "not a module:callable"),
        (["module:make"], "published", "module:make is a program of your own: .*leave them out"),
    ],
)
def test_unknown_names_are_refused(names: list[str], variant: str | None, message: str) -> None:
    with pytest.raises(WrongUse, match=message):
        find_targets(names, variant=variant)


def test_size_is_for_workloads_and_a_program_has_its_own() -> None:
    with pytest.raises(WrongUse, match=r"module:make is a program of your own: .*leave them out"):
        find_targets(["MMC", "module:make"], size="tiny")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:make", "no module 'no_such_module'; run from the folder"),
        ("explain_programs:mask_atribute", "no 'mask_atribute'; did you mean mask_attribute"),
        ("explain_programs:not_callable", "is a int, not callable"),
    ],
)
def test_programs_that_cannot_be_loaded_are_refused(name: str, message: str) -> None:
    with pytest.raises(WrongProgram, match=message):
        load(name)


def test_failing_import_of_a_module_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_program.py").write_text("import no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WrongProgram, match="importing broken_program failed: No module named 'no_such_dependency'"):
        load("broken_program:make")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("explain_programs:returns_a_number", "returned int; it must return"),
        ("explain_programs:ready_made", "exists already"),
    ],
)
def test_programs_that_return_something_else_are_refused(name: str, message: str) -> None:
    with pytest.raises(WrongProgram, match=message):
        load(name)()


def test_program_may_return_allowed_types() -> None:
    for name, arguments, keywords in (
        ("mask_attribute", 1, set()),
        ("WithExampleInputs", 1, set()),
        ("with_keywords", 1, {"scale"}),
    ):
        made = load(f"explain_programs:{name}")()
        assert callable(made.call)
        assert [(len(inputs.args), set(inputs.kwargs)) for inputs in made.sets] == [(arguments, keywords)]
