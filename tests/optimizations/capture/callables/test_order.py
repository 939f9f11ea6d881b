"""Orders of a schedule, where a program stands in one, and which micro-batches may share memory."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizations.capture.callables.memory_plan import lifetimes, most_alive, pools
from optimizations.capture.callables.order import (
    Event,
    Follower,
    WrongOrder,
    default_order,
    events,
    expanded,
    one_forward_one_backward,
)


def test_backwards_belong_to_forwards_in_turn() -> None:
    assert events([1, 1, 2, -2, -1, 2, -2, -1], 2) == (
        Event(1, 0, "forward"),
        Event(1, 1, "forward"),
        Event(2, 0, "forward"),
        Event(2, 0, "backward"),
        Event(1, 0, "backward"),
        Event(2, 1, "forward"),
        Event(2, 1, "backward"),
        Event(1, 1, "backward"),
    )


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([1, 3, -3, -1], r"order\[1\] is 3, but callables go from 1 to 2"),
        ([1, 2, 0, -1], r"order\[2\] is 0"),
        ([1, -2, 2, -1], r"order\[1\] is -2, but no forward of callable 2"),
        ([1, -1], "does not run callable 2"),
        ([1, 2, -2], "callable 1 has 1 forwards and 0 backwards"),
    ],
)
def test_an_order_nobody_can_follow_is_refused(order: list[int], words: str) -> None:
    with pytest.raises(WrongOrder, match=words):
        events(order, 2)


def test_the_default_is_all_forwards_and_then_all_backwards() -> None:
    assert default_order(3) == [1, 2, 3, -3, -2, -1]
    assert default_order(3, training=False) == [1, 2, 3]


def test_chunks_become_their_layers_backwards_in_reverse() -> None:
    assert expanded([1, 2, -2, -1], [2, 3]) == [1, 2, 3, 4, 5, -5, -4, -3, -2, -1]
    with pytest.raises(WrongOrder, match="chunks go from 1 to 2"):
        expanded([3], [2, 3])


def test_one_forward_one_backward() -> None:
    assert one_forward_one_backward(0, 4, 6) == [1, 1, 1, 1, -1, 1, -1, 1, -1, -1, -1, -1]
    assert one_forward_one_backward(3, 4, 3) == [1, -1, 1, -1, 1, -1]
    assert one_forward_one_backward(0, 8, 2) == [1, 1, -1, -1]
    with pytest.raises(WrongOrder):
        one_forward_one_backward(4, 4, 2)


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.integers(1, 9))))
def test_a_stage_keeps_as_many_micro_batches_as_stages_follow_it(case: tuple[int, int, int]) -> None:
    stages, stage, micro_batches = case
    order = events(one_forward_one_backward(stage, stages, micro_batches), 1)
    assert len(set(pools(order).values())) == most_alive(order) == min(stages - stage, micro_batches)


@st.composite
def orders(draw: st.DrawFn) -> list[int]:
    """Any order in which every forward has its backward."""
    count = draw(st.integers(1, 3))
    waiting = [number for number in range(1, count + 1) for _ in range(draw(st.integers(1, 4)))]
    open_, found = [], []
    while waiting or open_:
        if waiting and (not open_ or draw(st.booleans())):
            number = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
            open_.append(number)
            found.append(number)
        else:
            found.append(-open_.pop(draw(st.integers(0, len(open_) - 1))))
    return found


@given(orders())
def test_micro_batches_alive_together_share_no_memory(order: list[int]) -> None:
    planned = events(order, max(order))
    plan = pools(planned)
    spans = lifetimes(planned)
    assert len(plan) == len(spans)
    for one in spans:
        for other in spans:
            if one is not other and one.overlaps(other):
                assert plan[one.callable, one.micro_batch] != plan[other.callable, other.micro_batch]
    assert len(set(plan.values())) >= most_alive(planned)


@given(orders())
def test_memory_is_shared_where_it_can_be(order: list[int]) -> None:
    """Intervals that are coloured in the order of their beginnings need no more colours than are alive at a time."""
    planned = events(order, max(order))
    assert len(set(pools(planned).values())) == most_alive(planned)


def test_results_of_callables_without_backwards_lie_apart() -> None:
    assert pools(events([1, 2, 1, 2], 2)) == {(1, 0): 0, (1, 1): 0, (2, 0): 1, (2, 1): 1}


@given(orders())
def test_program_in_order_gets_its_micro_batches_repeatedly(order: list[int]) -> None:
    planned = events(order, max(order))
    follower = Follower(planned)
    for _ in range(2):
        assert follower.at_start
        for event in planned:
            if event.direction == "forward":
                assert follower.forward(event.callable) == event.micro_batch
            else:
                follower.backward(event.callable, event.micro_batch)


def test_call_out_of_order_names_the_expected_one() -> None:
    follower = Follower(events([1, 2, -2, -1], 2))
    follower.forward(1)
    with pytest.raises(
        WrongOrder, match="backward of callable 1, micro-batch 0 was called, but the order has the forward"
    ):
        follower.backward(1, 0)
    assert follower.forward(2) == 0
    with pytest.raises(WrongOrder, match="a forward of callable 1 was called"):
        follower.forward(1)
    follower.restart()
    assert follower.forward(1) == 0


def test_a_forward_without_a_graph_takes_its_backward_along() -> None:
    follower = Follower(events([1, 2, -2, -1], 2))
    follower.forward(1)
    follower.forward(2, skip=True)
    follower.backward(1, 0)
    assert follower.at_start


def test_an_order_may_be_numbers_of_numpy() -> None:
    order = [1, 1, 2, -2, -1, 2, -2, -1]
    assert events(numpy.array(order), 2) == events(order, 2)
    assert expanded(numpy.array(order), [2, 1]) == expanded(order, [2, 1])
    assert {type(entry) for entry in expanded(numpy.array(order), [1, 1])} == {int}
