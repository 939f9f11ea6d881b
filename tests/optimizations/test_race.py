"""A race of alternatives, on events that the test completes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from optimizations.race import CALLS, Race


@dataclass
class Clock:
    """A GPU whose time is set by the test."""

    now_ms: float = 0.0
    is_behind: bool = False

    def mark(self) -> Event:
        return Event(self, self.now_ms)


@dataclass
class Event:
    clock: Clock
    at_ms: float

    def query(self) -> bool:
        return not self.clock.is_behind

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


def running_calls(clock: Clock, ms: dict[str, float], used: list[str], counts: bool = True) -> Callable[..., str]:
    """Return a function that runs a call of a race, in `ms` milliseconds by alternative."""

    def run_call(race: Race) -> str:
        def call(name: str) -> tuple[str, tuple[Event, Event] | None]:
            used.append(name)
            start = clock.mark()
            clock.now_ms += ms[name]
            return name, (start, clock.mark()) if counts else None

        return race.run(call)

    return run_call


def run(clock: Clock, ms: dict[str, float], calls: int) -> tuple[Race, list[str]]:
    race, used = Race(list(ms)), []
    run_call = running_calls(clock, ms, used)
    for _ in range(calls):
        assert run_call(race) == used[-1]
    return race, used


def test_race_runs_each_alternative_equally_often(clock: Clock) -> None:
    race, used = run(clock, {"a": 1.0, "b": 0.5, "c": 2.0}, 3 * (CALLS + 1))
    assert used == ["a"] * (CALLS + 1) + ["b"] * (CALLS + 1) + ["c"] * (CALLS + 1)
    assert race.winner is None


def test_race_chooses_the_fastest(clock: Clock) -> None:
    race, used = run(clock, {"a": 1.0, "b": 0.5, "c": 2.0}, 3 * (CALLS + 1) + 2)
    assert race.winner == "b"
    assert used[-1] == "b"
    assert race.median_us == pytest.approx({"a": 1000, "b": 500, "c": 2000})


@pytest.mark.parametrize(("ms", "winner"), [(0.98, "a"), (0.96, "b"), (1.5, "a")])
def test_race_requires_a_gain_of_three_percent(clock: Clock, ms: float, winner: str) -> None:
    race, _ = run(clock, {"a": 1.0, "b": ms}, 2 * (CALLS + 1) + 1)
    assert race.winner == winner


def test_race_ignores_the_first_call(clock: Clock) -> None:
    """It uploads the graph."""
    ms = {"a": 1.0, "b": 100.0}
    race, used = Race(list(ms)), list[str]()
    run_call = running_calls(clock, ms, used)
    for index in range(2 * (CALLS + 1) + 1):
        if index == CALLS + 2:
            ms["b"] = 0.5
        run_call(race)
    assert race.median_us["b"] == pytest.approx(500)


def test_race_does_not_synchronize(clock: Clock) -> None:
    ms = {"a": 1.0, "b": 0.5}
    clock.is_behind = True
    race, used = run(clock, ms, 2 * (CALLS + 1) + 5)
    assert race.winner is None
    assert used[-5:] == ["a"] * 5, "the first alternative runs until all events have completed"
    clock.is_behind = False
    running_calls(clock, ms, used)(race)
    assert (race.winner, used[-1]) == ("b", "b")


def test_race_requires_nearly_disjoint_times(clock: Clock) -> None:
    """Half of the calls of both take as long as each other."""
    race, used, ms = Race(["a", "b"]), list[str](), {"a": 1.0, "b": 0.9}
    run_call = running_calls(clock, ms, used)
    for index in range(2 * (CALLS + 1) + 1):
        ms["a"] = ms["b"] = 0.8 if index % 2 else 1.0
        if len(used) > CALLS and index % 4 == 0:
            ms["b"] = 0.75
        run_call(race)
    assert race.median_us["b"] < 0.97 * race.median_us["a"]
    assert race.winner == "a"
