"""Lines that are looked for in the source of a step once it is refused."""

from __future__ import annotations

import types
from typing import Any

import pytest

from optimizations.capture.step.source_lines import BINDS, GROWS, STEPS, line_with

source: Any = None
scheduler: Any = None
trainer: Any = None


def reads_it_twice() -> Any:
    first = next(source)
    return first, next(source)


def changes_it() -> None:
    if trainer.count == 3:
        trainer.losses.append(trainer.count)
    trainer.count += 1
    scheduler.step()


def line_in(function: types.FunctionType, behind: int) -> str:
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno + behind} in {code.co_name}"


@pytest.mark.parametrize("path", ["source", "trainer.source", "source[0]", "source (2)"])
def test_first_line_that_names_a_value_is_found(path: str) -> None:
    assert line_with([changes_it.__code__, reads_it_twice.__code__], path) == line_in(reads_it_twice, 1)


@pytest.mark.parametrize(
    ("path", "then", "behind"), [("count", BINDS, 3), ("trainer.losses", GROWS, 2), ("scheduler", STEPS, 4)]
)
def test_line_that_changes_a_value_is_found(path: str, then: str, behind: int) -> None:
    assert line_with([reads_it_twice.__code__, changes_it.__code__], path, then) == line_in(changes_it, behind)


def test_value_that_no_line_names_has_none() -> None:
    assert line_with([reads_it_twice.__code__], "other") is None
