"""Orders of schedules become events, and events become a plan with the fewest graphs and memory pools."""

from __future__ import annotations

from collections import Counter

import pytest

from optimizations.capture.callables.order import (
    Event,
    WrongOrder,
    default_order,
    events,
    expanded,
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


def test_default_order_is_all_forwards_then_all_backwards() -> None:
    assert default_order(3) == [1, 2, 3, -3, -2, -1]
    assert default_order(2, training=False) == [1, 2]


def test_chunks_become_their_layers_and_backwards_in_reverse() -> None:
    assert expanded([1, 2, -2, -1], [2, 1]) == [1, 2, 3, -3, -2, -1]
    with pytest.raises(WrongOrder, match=r"order\[0\] is 3, but chunks go from 1 to 2"):
        expanded([3], [2, 1])


@pytest.mark.parametrize("case", [(4, 0, 6), (4, 3, 3), (8, 0, 2), (2, 0, 8)])
def test_stage_has_one_graph_for_each_later_stage(case: tuple[int, int, int]) -> None:
    stages, stage, micro_batches = case
    plan = plan_graphs(events(one_forward_one_backward(stage, stages, micro_batches), 1))
    assert len(plan) == len({place.pool for place in plan}) == min(stages - stage, micro_batches)


ORDERS = [
    [1, 1, 2, 2, -2, -2, -1, -1],
    [1, 1, 2, -2, -1, 1, 2, -2, -1, 2, -2, -1],
    [1, 2, 1, 2, -2, 1, 2, -2, -1, -2, -1, -1],
    [1, -1, 2, -2, 3, -3],
    [1, -1, 2, 3, -2, -3, 1, -1],
]


@pytest.mark.parametrize("order", ORDERS)
def test_pairs_live_together_share_no_memory(order: list[int]) -> None:
    pool_of = {(one.callable, one.index): one.pool for one in plan_graphs(events(order, max(order)))}
    alive: dict[int, list[int]] = {number: [] for number in range(1, max(order) + 1)}
    for entry in order:
        if entry < 0:
            alive[-entry].pop(0)
            continue
        index = next(n for n in range(len(order)) if n not in alive[entry])
        alive[entry].append(index)
        pools = [pool_of[number, index] for number, indices in alive.items() for index in indices]
        assert len(pools) == len(set(pools))


@pytest.mark.parametrize("order", ORDERS)
def test_pairs_never_live_together_share_memory(order: list[int]) -> None:
    alive: Counter[int] = Counter()
    most = 0
    for entry in order:
        alive[abs(entry)] += 1 if entry > 0 else -1
        most = max(most, alive.total())
    assert len({one.pool for one in plan_graphs(events(order, max(order)))}) == most


def test_results_without_backwards_share_no_memory() -> None:
    plan = plan_graphs(events([1, 2, 1, 2], 2))
    assert [(one.callable, one.index) for one in plan] == [(1, 0), (2, 0)]
    assert len({one.pool for one in plan}) == 2
    mixed = [Event(1, "forward", has_backward=False), Event(2, "forward"), Event(2, "backward")]
    assert len({one.pool for one in plan_graphs(mixed)}) == 2


def test_callables_in_step_have_equally_many_pools() -> None:
    plan = plan_graphs(events([1, 1, 2, -2, -1, 2, -2, -1], 2), in_step=True)
    assert sorted((one.callable, one.index) for one in plan) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert len({one.pool for one in plan}) == 4


def test_backwards_may_come_in_any_order() -> None:
    """As recorded: the last micro-batch's backward comes first, and its graphs are free first."""
    order = [
        *(Event(1, "forward", micro_batch=0), Event(1, "forward", micro_batch=1)),
        *(Event(1, "backward", micro_batch=1), Event(2, "forward", micro_batch=2)),
        *(Event(2, "backward", micro_batch=2), Event(1, "backward", micro_batch=0)),
    ]
    plan = {(one.callable, one.index): one.pool for one in plan_graphs(order)}
    assert plan[2, 0] == plan[1, 1]
