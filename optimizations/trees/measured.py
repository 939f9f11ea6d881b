"""Time a function's alternatives: no graph, a graph that copies inputs, or one that reads them in place.

This is the option `selection="measure"`, the papers' profiling in bounded form. It begins once nothing is pending for
the function's graphs. A race (`optimizations.race`) then runs the program's own calls by each alternative, and all
later calls by the fastest. No graph is an alternative for inference only: the backward of a forward without a graph
would have to run without one as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch

from optimizations.calls.turns import inside_another
from optimizations.race import Events, Race, mark
from optimizations.selection import Decision
from optimizations.trees.function import RecordableFunction
from optimizations.trees.hook import resting


class Measured:
    """Run the calls of a function until its alternative is chosen.

    Args:
        function: the function.
        recorded: runs a call through the function's manager.

    Attributes:
        race: times the alternatives; None before it begins and after it ended.
    """

    def __init__(self, function: RecordableFunction, recorded: Callable[[list[Any]], Any]) -> None:
        self._function = function
        self._recorded = recorded
        self._mark = functools.partial(mark, function.device_index)
        self.race: Race | None = None

    def __call__(self, inputs: list[Any]) -> Any:
        race, function = self.race, self._function
        if resting() or inside_another(function.turn) or torch.cuda.is_current_stream_capturing():
            return self._recorded(inputs)
        if race is None:
            outputs = self._recorded(inputs)
            if function.waiting is None or function.without_graph is not None:
                self._begin()
            return outputs
        outputs = race.run(functools.partial(self._run_by, inputs))
        if race.winner is not None:
            function.median_us = race.median_us
            times = ", ".join(f"{name} {microseconds:.1f} us" for name, microseconds in race.median_us.items())
            self._decide(race.winner, f"measured: {times}")
        return outputs

    def _begin(self) -> None:
        """Begin a race, unless there is nothing to choose from."""
        function = self._function
        in_place = any(one.indirect for report in function.recordings() for one in report.inputs)
        alternatives = ["in place", "copies"] if in_place else ["copies"]
        if function.direction == "inference" and function.short_of_memory() is None:
            alternatives.append("no graph")
        if function.without_graph is None and not function.code().collective and len(alternatives) > 1:
            self.race = Race(alternatives)
        else:
            self._decide(alternatives[0], "there is nothing to choose from")

    def _run_by(self, inputs: list[Any], alternative: str) -> tuple[Any, Events | None]:
        """Run a call by an alternative. Return the results, and its events if it really ran by that alternative."""
        function, start = self._function, self._mark()
        if alternative == "no graph":
            return function.run_past_manager(inputs), (start, self._mark())
        function.copy_inputs(alternative == "copies")
        before = function.replays()
        outputs = self._recorded(inputs)
        return outputs, (start, self._mark()) if function.replays() == before + 1 else None

    def _decide(self, decision: str, why: str) -> None:
        self.race = None
        if decision != "no graph":
            self._function.copy_inputs(decision == "copies")
        if self._function.without_graph is None:
            self._function.decide(cast(Decision, decision), why)
        self._function.replace_call(self._function, self._recorded)
