"""One function in its group: what is called in its place, and what it says of itself."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from optimizations.replay.turns import LENT, is_lent
from optimizations.report.recordings import Direction
from optimizations.report.selection import SelectionReport
from optimizations.selection.group import Group, leave
from optimizations.selection.identity import circumstances, graph_digest
from optimizations.selection.ranks import without_device
from optimizations.selection.settings import Settings
from optimizations.selection.verdict import Circumstances

Candidate = Literal["none", "copy", "indirection"]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a function stands.

    Attributes:
        waiting: why its graphs are not as they will stay yet; None where they are.
        refused: why it cannot be served by a graph at all; None where it can.
        in_place: whether a graph of it reads an input in place that stock would copy.
        recordings: graphs recorded so far.
        threads: that called functions of its manager.
        collectives: whether it holds collectives of several processes.
    """

    waiting: str | None
    refused: str | None
    in_place: bool
    recordings: int
    threads: Set[int]
    collectives: bool = False


class Followed(Protocol):
    """A recording behind a group's own: whose it is, how often it was replayed, and how long recording it took."""

    replays: int
    recording_s: float

    @property
    def function(self) -> object: ...


class Function(Protocol):
    """What is selected for; `capture.trees.function.RecordableFunction`."""

    direction: Direction
    generated: Callable[..., Any]

    def serve(self, candidate: Candidate) -> None:
        """Let the next calls be served like this."""

    def retire(self) -> None:
        """What is served without a graph from now on needs none: what its graphs hold may be freed."""

    def standing(self) -> Standing: ...

    def so_far(self) -> tuple[int, int]:
        """Calls without a graph, and recordings. Asked of all functions before and behind each iteration that is
        measured, so it takes no time."""

    def recorded_behind(self, seen: set[Any]) -> Iterator[Followed]:
        """The recordings behind its own, but those in `seen`, to which these and its own are added."""

    def short_of_memory(self) -> str | None:
        """Why calls should not be tried without a graph: memory is short. None where they may be."""


class Member:
    """One function in its group.

    Args:
        integers: the sizes it is called with, where these differ from call to call.
        watched: inputs whose addresses may move.

    Attributes:
        serial: tells members apart, in the order in which they were made.
        producers: serials of members whose results it reads in graph memory.
        pause: calls that are served without a look.
        plainly: whether calls are served without a graph.
        turn: held by whoever calls the function's graphs, or changes how they are served. Note [Locks] in `group`.
        circumstances: what a verdict on it holds for, if inputs do not move; None where its source cannot be read.
    """

    def __init__(
        self,
        function: Function,
        settings: Settings,
        device_index: int,
        *,
        integers: Sequence[int] = (),
        watched: Sequence[int] = (),
    ) -> None:
        self.serial = next(_SERIALS)
        self._function = weakref.ref(function)
        self.settings = settings
        self.device_index = device_index
        self.direction: Direction = function.direction
        self.watched = tuple(watched)
        self.producers: set[int] = set()
        self.pause = 0
        self.plainly = False
        self.turn: AbstractContextManager[Any] = contextlib.nullcontext()
        self.circumstances: Circumstances | None = None
        self._integers = tuple(integers)
        digest = graph_digest(function.generated, integers, (function.direction,))
        if digest is not None:
            self.circumstances = circumstances(digest, settings.options, settings.objective, device_index)
        self.group = Group(self)

    @property
    def function(self) -> Function | None:
        """The function; None once it is gone."""
        return self._function()

    @functools.cached_property
    def shared_name(self) -> str | None:
        """What tells the function from others and is the same on all ranks; None where its source cannot be read."""
        function = self.function
        if function is None:
            return None
        return graph_digest(function.generated, self._integers, (self.direction,), without_device)

    def served(
        self,
        recorded: Callable[[list[Any]], Any],
        plain: Callable[[list[Any]], Any] | None = None,
        aside: Callable[[], bool] = lambda: False,
        turn: AbstractContextManager[Any] | None = None,
    ) -> Callable[[list[Any]], Any]:
        """What is called in place of `recorded`, which serves a call as the manager does.

        `plain`: the function without a graph, past the manager. `aside`: whether graphs are set aside for a while, and
        calls say nothing of them. `turn`: the manager's.
        """
        if turn is not None:
            self.turn = turn
        # A forward is on its manager's books until its backward ran.
        past = plain if plain is not None and self.direction == "inference" else recorded

        def call(inputs: list[Any]) -> Any:
            if LENT and is_lent(turn):  # Note [Backwards inside of functions] in `replay.turns`
                return recorded(inputs)
            if self.pause > 0:  # two threads may take it below
                self.pause -= 1
            elif not aside():
                return self.group.call(self, recorded, past, inputs)
            if not self.plainly:
                return recorded(inputs)
            try:
                return past(inputs)
            except torch.OutOfMemoryError:
                self.group.ran_out_of_memory(self)
                raise

        return call

    def reads_results_of(self, producers: Sequence[Member]) -> None:
        """To be told when a graph of this function was recorded that reads results of graphs of these."""
        for producer in producers:
            if producer is not self:
                self.producers.add(producer.serial)
                self.group.join(producer.group)

    def leave(self) -> None:
        """To be told when the function is never called again, though somebody may hold it."""
        leave(self)

    def describe(self) -> SelectionReport:
        """The report of this function."""
        return self.group.describe(self.direction)


_SERIALS = itertools.count(1)
