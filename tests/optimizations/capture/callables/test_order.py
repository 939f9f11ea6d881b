"""Orders of schedules tell how many forwards of each callable are live at one time."""

from __future__ import annotations

from typing import Any

import pytest

from optimizations.capture.callables.order import live_at_once
from optimizations.report.steps import WrongOrder


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[int]:
    """The order of one stage of a pipeline, 0 the first (PipeDream-Flush; Narayanan et al. 2021)."""
    ahead = min(stages - stage - 1, micro_batches)
    return [1] * ahead + [1, -1] * (micro_batches - ahead) + [-1] * ahead


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([1, 3, -3, -1], r"order\[1\] is 3, but callables go from 1 to 2"),
        ([1, -1, -1, 2, -2], r"order\[2\] is -1, but no forward of callable 1 is without backward"),
        ([1, -1], "the order does not run callable 2"),
        ([1, 1, 2, -2, -1], "callable 1 has 2 forwards and 1 backwards"),
        ([1, 2, 1, 2], "callable 1 has 2 forwards and 0 backwards; each forward needs one"),
        ([1, 0, 2], r"order\[1\] is 0"),
        *(([1, wrong], rf"order\[1\] is {wrong!r}: entries are whole numbers") for wrong in (True, -1.5, "1", None)),
    ],
)
def test_impossible_order_is_refused(order: list[Any], words: str) -> None:
    with pytest.raises(WrongOrder, match=words):
        live_at_once(order, 2)


@pytest.mark.parametrize("case", [(4, 0, 6), (4, 3, 3), (8, 0, 2), (2, 0, 8)])
def test_stage_has_one_graph_for_each_later_stage(case: tuple[int, int, int]) -> None:
    stages, stage, micro_batches = case
    found = live_at_once(one_forward_one_backward(stage, stages, micro_batches), 1)
    assert found == [min(stages - stage, micro_batches)]


@pytest.mark.parametrize(
    ("order", "pairs"),
    [
        ([1, 1, 2, 2, -2, -2, -1, -1], [2, 2]),
        ([1, 1, 2, -2, -1, 1, 2, -2, -1, 2, -2, -1], [2, 1]),
        ([1, 2, 1, 2, -2, 1, 2, -2, -1, -2, -1, -1], [3, 2]),
        ([1, -1, 2, 3, -2, -3, 1, -1], [1, 1, 1]),
    ],
)
def test_callable_has_as_many_pairs_as_live_at_once(order: list[int], pairs: list[int]) -> None:
    assert live_at_once(order, max(order)) == pairs
