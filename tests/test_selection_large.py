"""What measuring a group of hundreds of functions costs the host: it grows with them, and not with their square."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cuda_on_cpu import cuda_on_cpu
from selection_on_cpu import make
from test_selection_groups import FakeFunction, called_in_turn, grouped

from optimizations.selection import timing
from optimizations.selection.measurement import Measurement
from optimizations.selection.selector import Selector

__all__ = ["cuda_on_cpu", "make"]


@pytest.mark.parametrize("profiled", [False, True])
def test_an_iteration_of_a_large_group_asks_and_changes_each_function_a_few_times_only(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profiled: bool
) -> None:
    """Not all of them in each call, and how each of them stands once."""
    make()
    functions = [FakeFunction() for _ in range(50)]
    members = grouped(functions, tmp_path)
    calls = [one.served(lambda inputs: None) for one in members]
    called_in_turn(calls, 20)
    assert members[0].describe().state == "measuring"
    asked: list[str] = []
    for name in ("standing", "so_far", "serve"):
        method = getattr(FakeFunction, name)

        def counted(self: FakeFunction, *arguments: Any, name: str = name, method: Any = method) -> Any:
            asked.append(name)
            return method(self, *arguments)

        monkeypatch.setattr(FakeFunction, name, counted)
    if profiled:
        monkeypatch.setattr(timing, "is_profiled", lambda: True)
    called_in_turn(calls, 10)
    found = {name: count / len(functions) for name, count in Counter(asked).items()}
    assert found == ({"serve": 1} if profiled else {"standing": 10, "serve": 10, "so_far": 20})


class Serial(int):
    """Counts how often one is compared with another."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Serial.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


class Clock:
    def begin(self) -> None:
        pass

    def end(self) -> Any:
        return type("Known", (), {"seconds": lambda self: 1e-3})()


def test_whether_calls_were_served_as_asked_is_no_question_to_each_pair_of_functions() -> None:
    members = [Serial(number) for number in range(200)]
    found = Measurement(Selector(("none", "copy")), Clock())
    runs = dict.fromkeys(members, 0)
    turns = 0
    for _ in range(8):
        assert found.begin_iteration(members)
        turn = found.next_turn() if found.knows_order else None
        if turn is not None:
            found.begin(turn, {one: (runs[one], 1) for one in members})
        for one in members:
            found.called(one)
            runs[one] += turn is not None and turn.candidate == "none"
        if turn is not None:
            Serial.compared = 0
            found.end(found.stop(), {one: (runs[one], 1) for one in members})
            assert Serial.compared <= 2 * len(members)
            turns += 1
    assert turns >= 4
    assert sum(found.selector.measured_calls.values()) == turns - 1, "all count, and the last is not over"
