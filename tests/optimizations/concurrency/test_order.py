"""Launches of a captured graph wait for those that they conflict with, and for no others."""

from __future__ import annotations

import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from optimizations.concurrency.order import Launch, LaunchOrder, Span, order_launches

SPANS = st.tuples(st.integers(0, 24), st.integers(1, 6)).map(lambda pair: (pair[0], pair[0] + pair[1]))
DRAWN = st.lists(
    st.tuples(
        st.lists(SPANS, max_size=3),
        st.lists(SPANS, max_size=2),
        st.integers(1, 3),
        st.integers(0, 9).map(lambda n: n == 0),
    ),
    max_size=14,
)


def launches_of(drawn: list[tuple[list[Span], list[Span], int, bool]]) -> list[Launch]:
    launches, first = [], 0
    for number, (reads, writes, count, is_barrier) in enumerate(drawn):
        barrier = "a custom operator" if is_barrier else None
        launches.append(Launch(f"launch {number}", first, count, tuple(reads), tuple(writes), barrier))
        first += count
    return launches


def overlap(some: tuple[Span, ...], others: tuple[Span, ...]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)


def conflict(one: Launch, other: Launch) -> bool:
    if one.barrier or other.barrier:
        return True
    return overlap(one.writes, other.reads + other.writes) or overlap(one.reads, other.writes)


def reachable(order: LaunchOrder) -> list[set[int]]:
    before: list[set[int]] = []
    for waits in order.waits_for:
        before.append(set(waits).union(*(before[one] for one in waits)))
    return before


def brute_force(launches: list[Launch]) -> list[set[int]]:
    before: list[set[int]] = []
    for index, launch in enumerate(launches):
        direct = {earlier for earlier in range(index) if conflict(launches[earlier], launch)}
        before.append(direct.union(*(before[one] for one in direct)))
    return before


@given(DRAWN)
def test_order_follows_from_all_conflicts(drawn: list[tuple[list[Span], list[Span], int, bool]]) -> None:
    launches = launches_of(drawn)
    assert reachable(order_launches(launches)) == brute_force(launches)


@given(DRAWN)
def test_order_has_no_redundant_waits(drawn: list[tuple[list[Span], list[Span], int, bool]]) -> None:
    order = order_launches(launches_of(drawn))
    before = reachable(order)
    for waits in order.waits_for:
        for one in waits:
            assert not any(one in before[other] for other in waits if other != one)


@given(DRAWN)
def test_node_edges_lead_forward_and_keep_launches(drawn: list[tuple[list[Span], list[Span], int, bool]]) -> None:
    order = order_launches(launches_of(drawn))
    edges = order.node_edges()
    assert all(source < target for source, target in edges)
    assert len(set(edges)) == len(edges)
    for launch in order.launches:
        assert {*pairwise(range(launch.first, launch.last + 1))} <= set(edges)


def test_memory_in_many_pieces_is_ordered_in_seconds() -> None:
    count = 4000
    launches = [Launch("a part", index, 1, (), ((index, index + 1),)) for index in range(count)]
    launches += [Launch("all", count + index, 1, ((0, count),), ((0, count),)) for index in range(count)]
    began_s = time.process_time()
    order = order_launches(launches)
    assert len(order.waits_for[count]) == count and time.process_time() - began_s < 5
