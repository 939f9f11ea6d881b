"""Orders of schedules become events, and events become a plan with the fewest graphs and memory pools."""

from __future__ import annotations

from collections import Counter

import pytest

from optimizations.capture.callables.order import (
    Event,
    WrongOrder,
    events,
    plan_graphs,
)


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[int]:
    """The order of one stage of a pipeline, 0 the first (PipeDream-Flush; Narayanan et al. 2021)."""
    ahead = min(stages - stage - 1, micro_batches)
    return [1] * ahead + [1, -1] * (micro_batches - ahead) + [-1] * ahead


def test_backwards_match_forwards_in_order() -> None:
    found = [(one.callable, one.micro_batch, one.direction) for one in events([1, 1, 2, -1, -2, -1], 2)]
    assert found == [
        *((1, 0, "forward"), (1, 1, "forward"), (2, 0, "forward")),
        *((1, 0, "backward"), (2, 0, "backward"), (1, 1, "backward")),
    ]


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([1, 3, -3, -1], r"order\[1\] is 3, but callables go from 1 to 2"),
        ([1, -1, -1, 2, -2], r"order\[2\] is -1, but no forward of callable 1 is without backward"),
        ([1, -1], "the order does not run callable 2"),
        ([1, 1, 2, -2, -1], "callable 1 has 2 forwards and 1 backwards"),
        ([1, 0, 2], r"order\[1\] is 0"),
        ([1, True, 2], r"order\[1\] is True: entries are whole numbers"),
        ([1, -1.5, 2], r"order\[1\] is -1.5: entries are whole numbers"),
    ],
)
def test_impossible_order_is_refused(order: list[int], words: str) -> None:
    with pytest.raises(WrongOrder, match=words):
        events(order, 2)


@pytest.mark.parametrize("case", [(4, 0, 6), (4, 3, 3), (8, 0, 2), (2, 0, 8)])
def test_stage_has_one_graph_for_each_later_stage(case: tuple[int, int, int]) -> None:
    stages, stage, micro_batches = case
    plan = plan_graphs(events(one_forward_one_backward(stage, stages, micro_batches), 1))
    assert [place.index for place in plan] == list(range(min(stages - stage, micro_batches)))


@pytest.mark.parametrize(
    ("order", "pairs"),
    [
        ([1, 1, 2, 2, -2, -2, -1, -1], {1: 2, 2: 2}),
        ([1, 1, 2, -2, -1, 1, 2, -2, -1, 2, -2, -1], {1: 2, 2: 1}),
        ([1, 2, 1, 2, -2, 1, 2, -2, -1, -2, -1, -1], {1: 3, 2: 2}),
        ([1, -1, 2, 3, -2, -3, 1, -1], {1: 1, 2: 1, 3: 1}),
        ([1, 2, 1, 2], {1: 1, 2: 1}),  # results without backwards are moved
    ],
)
def test_callable_has_as_many_pairs_as_live_at_once(order: list[int], pairs: dict[int, int]) -> None:
    assert Counter(one.callable for one in plan_graphs(events(order, max(order)))) == pairs


def test_callables_in_step_have_equally_many_pairs() -> None:
    plan = plan_graphs(events([1, 1, 2, -2, -1, 2, -2, -1], 2), in_step=True)
    assert sorted((one.callable, one.index) for one in plan) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_recorded_forward_without_backward_counts_no_pair() -> None:
    order = [Event(1, "forward", micro_batch=0), Event(1, "forward", micro_batch=1), Event(1, "backward", 0, 1)]
    assert len(plan_graphs([*order, *order])) == 1
