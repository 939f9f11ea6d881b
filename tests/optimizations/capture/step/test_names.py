"""What a step reads is told from what only has the same name: scripts are replayed, and no value is one from before."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lookup_programs import LOOKUPS
from name_programs import CALLS, COINCIDES, READS, run_read, run_script
from text_programs import MORE_LOOKUPS

from optimizations.capture.step.name_uses import GLOBAL, Use, name_uses

SIMULATED = "ignore:.*runs without a CUDA graph"


PROGRAMS = {**READS, **LOOKUPS, **MORE_LOOKUPS}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings(SIMULATED)
def test_what_a_step_reads_in_any_way_is_never_one_from_before(name: str) -> None:
    expected, _ = run_read(PROGRAMS[name], graphed=False)
    found, report = run_read(PROGRAMS[name], graphed=True)
    assert all(map(torch.equal, found, expected))
    assert report.replays >= 3, "it is replayed between the changes"


@pytest.mark.parametrize("name", COINCIDES)
def test_a_script_is_replayed_though_it_uses_a_name_again(name: str) -> None:
    expected, _ = run_script(COINCIDES[name], graphed=False)
    found, report = run_script(COINCIDES[name], graphed=True)
    assert len(expected) == len(found) and all(map(torch.equal, found, expected))
    assert (report.replays, report.refusals) == (CALLS - 3, ())


@pytest.mark.parametrize("name", ["a plain script", "a trainer that counts"])
def test_so_is_a_module_that_is_imported(name: str) -> None:
    _, report = run_script(COINCIDES[name], graphed=True, name="script_of_names")
    assert report.replays == CALLS - 3


# How names are told from each other.


def uses(code: Callable[..., Any]) -> Any:
    return name_uses(code.__code__)


def test_globals_are_those_that_code_loads() -> None:
    def step(batch: Any) -> Any:
        class Inner:
            field = of_a_body  # type: ignore[name-defined] # noqa: F821

        return batch.attribute, [of_a_comprehension for _ in batch], lambda: of_a_function  # type: ignore[name-defined] # noqa: F821

    found = uses(step)
    assert {"of_a_body", "of_a_comprehension", "of_a_function"} <= found.globals
    assert "attribute" not in found.globals and "attribute" in found.attributes
    assert found.attributes.isdisjoint({"of_a_body", "of_a_comprehension", "of_a_function"})


def test_strings_that_are_only_keys_are_no_names() -> None:
    def step(self: Any, batch: Any) -> Any:
        out = {"shown": batch["read"], "called": batch["given"].sum()}
        out["written"] = batch["x"] * 2
        out["added"] += batch["x"]
        del out["gone"]
        if "held" in batch and batch["mode"] == "compared":
            return {"alone": out}
        return out

    found = uses(step)
    keys = {"read", "given", "written", "added", "gone", "held", "mode", "compared", "alone", "x"}
    assert keys <= found.keys and found.attributes.isdisjoint(keys)


def test_other_strings_are_names() -> None:
    def step(self: Any, batch: Any, flag: bool) -> Any:
        name = "stored"
        listed = ["listed", "one more of it", name]
        self.put("given", key="by_key")
        chosen = batch["chosen" if flag else "other"]
        mapped = {"x": "value"}
        return "returned", listed, chosen, mapped, "added" + name, getattr(self, "dotted.path")

    names = {"stored", "listed", "given", "by_key", "chosen", "other", "value", "returned", "added", "dotted", "path"}
    assert names <= uses(step).attributes


def test_attributes_are_known_where_nothing_stands_between() -> None:
    def step(self: Any, flag: bool) -> Any:
        self.optimizer.step()
        self.scaler.update(self.optimizer)
        me = self
        me.first()
        (me or self).second()
        (self.a if flag else self.b).third()
        self.call().fourth()
        return lambda: self.inner.fifth()

    found = uses(step)
    known = {(use.name, use.owner[1:], use.given) for use in found.known}
    assert ("step", ("self", "optimizer"), ()) in known
    assert ("update", ("self", "scaler"), (("first", "self", "optimizer"),)) in known
    assert ("fifth", ("self", "inner"), ()) in known
    assert {"first", "second", "third", "fourth"} <= found.attributes


def test_a_first_parameter_that_is_written_is_not_known() -> None:
    def written(self: Any) -> Any:
        self = self.other
        self.step()

    def written_inside(self: Any) -> Any:
        def inner() -> None:
            nonlocal self
            self = None

        inner()
        self.step()

    assert "step" in uses(written).attributes
    assert "step" in uses(written_inside).attributes or "self" in uses(written_inside).stored


def test_a_variable_of_an_inner_function_is_not_that_of_the_outer_one() -> None:
    def step(self: Any) -> Any:
        return lambda self: self.optimizer.step()

    assert {"optimizer", "step"} <= uses(step).attributes


def test_a_global_is_an_owner() -> None:
    scope: dict[str, Any] = {}
    exec("def step(): optimizer.step(); module.part.run(1)", scope)  # noqa: S102
    found = uses(scope["step"])
    assert Use("step", (GLOBAL, "optimizer")) in found.known
    assert Use("run", (GLOBAL, "module", "part")) in found.known
    assert isinstance(scope["step"], types.FunctionType)
