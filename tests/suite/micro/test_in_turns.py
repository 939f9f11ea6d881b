"""Times of several ways, taken side by side."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from suite.measure.launches import HostParts
from suite.micro import in_turns
from suite.micro.in_turns import Times, times_in_turns


def host(us: float) -> HostParts:
    return HostParts(before_us=us, launch_us=2 * us, between_us=0.0, behind_us=3 * us)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who was called, a letter for each; the host's parts are how often the host was asked so far."""
    found: list[str] = []
    asked: list[int] = []

    def parts(call: Callable[[int], object], wait: object, calls: int, *, at_work: bool = False) -> HostParts | None:
        asked.append(calls)
        return None if call(-1) is None else host(len(asked))

    monkeypatch.setattr(in_turns, "host_parts", parts)
    monkeypatch.setattr(in_turns, "waited_us", lambda run, wait: float(run()))
    return found


def named(order: list[str], name: str) -> Callable[[int], int]:
    def call(index: int) -> int:
        order.append(name)
        return index

    return call


def test_ways_have_equal_turns_and_rotate_the_first(order: list[str]) -> None:
    times = times_in_turns([named(order, "a"), named(order, "b")], lambda: None, 25)
    warm_up = in_turns.WARM_UP
    assert "".join(order[: 2 * warm_up]) == "a" * warm_up + "b" * warm_up

    def turns(first: str, second: str, samples: int) -> str:
        return first * (samples + 3) + second * (samples + 3)  # one before, and the host's parts, twice

    assert "".join(order[2 * warm_up :]) == turns("a", "b", 10) + turns("b", "a", 10) + turns("a", "b", 5)
    assert [one.whole_us for one in times] == [[*map(float, range(10))] * 2 + [*map(float, range(5))]] * 2


def test_what_is_the_hosts_is_the_median_over_turns(order: list[str]) -> None:
    only, other = times_in_turns([named(order, "a"), named(order, "b")], lambda: None, 3, turn=1)
    # a is asked 1st and 2nd, then 7th and 8th (b was first), then 9th and 10th; b is asked in between.
    assert only.host == host(7) and only.host_at_work == host(8)
    assert other.host == host(5) and other.host_at_work == host(6)


def test_who_launches_no_graph_has_times_all_the_same(order: list[str]) -> None:
    (found,) = times_in_turns([lambda index: index if index >= 0 else None], lambda: None, 2)  # type: ignore[arg-type]
    assert found == Times([0.0, 1.0], None, None)
