"""Lines that are looked for in code once a step is refused: one that is named is the right one, or none is named."""

from __future__ import annotations

import types
from typing import Any

import pytest

from optimizations.capture.step.changing_lines import line_that_calls, line_that_names

source: Any = None
scheduler: Any = None


def reads_it_twice() -> Any:
    first = next(source)
    return first, next(source)


def reads_it_as_well() -> Any:
    return next(source)


def has_a_variable_of_that_name() -> int:
    source = 3
    return source + 1


def calls_it() -> None:
    scheduler.optimizer.zero_grad()
    scheduler.step()


def line_in(function: types.FunctionType, behind: int) -> str:
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno + behind} in {code.co_name}"


@pytest.mark.parametrize("path", ["source", "trainer.source", "source[0]", "source in reads_it_twice"])
def test_the_first_line_that_names_it_is_told(path: str) -> None:
    codes = [has_a_variable_of_that_name.__code__, reads_it_twice.__code__]
    assert line_that_names(codes, path) == line_in(reads_it_twice, 1)


def test_ambiguous_or_unnamed_value_has_no_line() -> None:
    codes = [reads_it_twice.__code__, reads_it_as_well.__code__]
    assert line_that_names(codes, "source") is None
    assert line_that_names(codes, "source's other name") is None
    assert line_that_names(codes[:1], "other") is None


def test_the_line_that_calls_a_method_of_an_object_is_told() -> None:
    codes = [calls_it.__code__, reads_it_twice.__code__]
    assert line_that_calls(codes, "scheduler.last_epoch", "step") == line_in(calls_it, 2)
    assert line_that_calls(codes, "last_epoch", "step") is None
