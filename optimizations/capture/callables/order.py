"""Follow the order in which callables run forward and backward, micro-batch by micro-batch. Pure.

`[1, 1, 2, 2, -2, -2, -1, -1]`: two forwards of callable 1, two of callable 2, then their backwards. The n-th -c is the
backward of the n-th c, as in the schedules of Megatron and Transformer Engine.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Direction = Literal["forward", "backward"]


class WrongOrder(ValueError):
    """Report an order that no training loop can follow, or a call that does not follow it."""


@dataclass(frozen=True, slots=True)
class Event:
    """Name a forward or backward of a callable (numbered from 1) for one of its micro-batches (from 0)."""

    callable: int
    micro_batch: int
    direction: Direction

    def __str__(self) -> str:
        return f"{self.direction} of callable {self.callable}, micro-batch {self.micro_batch}"


def events(order: Iterable[int], callables: int) -> tuple[Event, ...]:
    """Return an order as events. Either every forward has its backward or none has.

    Raises:
        WrongOrder: it names a callable there is not, lacks one, or has a backward before its forward; the message says
            which entry.
    """
    found: list[Event] = []
    forwards: Counter[int] = Counter()
    backwards: Counter[int] = Counter()
    for place, given in enumerate(order):
        entry = _whole(place, given)
        number = abs(entry)
        if not 1 <= number <= callables:
            raise WrongOrder(f"order[{place}] is {entry}, but callables go from 1 to {callables}")
        if entry > 0:
            found.append(Event(number, forwards[number], "forward"))
            forwards[number] += 1
        else:
            if backwards[number] >= forwards[number]:
                raise WrongOrder(f"order[{place}] is {entry}, but no forward of callable {number} is without backward")
            found.append(Event(number, backwards[number], "backward"))
            backwards[number] += 1
    if missing := [number for number in range(1, callables + 1) if not forwards[number]]:
        raise WrongOrder(f"the order does not run callable {missing[0]}")
    if backwards and (unequal := [number for number in forwards if forwards[number] != backwards[number]]):
        raise WrongOrder(
            f"callable {unequal[0]} has {forwards[unequal[0]]} forwards and {backwards[unequal[0]]} backwards; "
            "each forward needs one, or none of any callable"
        )
    return tuple(found)


def is_training(order: Iterable[Event]) -> bool:
    """Return whether there are backwards in an order."""
    return any(event.direction == "backward" for event in order)


def default_order(callables: int, *, training: bool = True) -> list[int]:
    """Return all forwards, then all backwards in reverse, for one micro-batch."""
    forward = list(range(1, callables + 1))
    return forward + [-number for number in reversed(forward)] if training else forward


def expanded(order: Iterable[int], sizes: Sequence[int]) -> list[int]:
    """Return an order of chunks as an order of their layers: `sizes[c - 1]` layers stand for chunk c.

    Raises:
        WrongOrder: it names a chunk there is not.
    """
    first = [1]
    for size in sizes:
        first.append(first[-1] + size)
    found: list[int] = []
    for place, given in enumerate(order):
        entry = _whole(place, given)
        if not 1 <= abs(entry) <= len(sizes):
            raise WrongOrder(f"order[{place}] is {entry}, but chunks go from 1 to {len(sizes)}")
        layers = range(first[abs(entry) - 1], first[abs(entry)])
        found += layers if entry > 0 else [-layer for layer in reversed(layers)]
    return found


def _whole(place: int, entry: Any) -> int:
    """Return an entry of an order as a number of Python's: NumPy has whole numbers, too."""
    if not isinstance(entry, bool):
        with contextlib.suppress(TypeError):
            return operator.index(entry)
    raise WrongOrder(
        f"order[{place}] is {entry!r}: entries are whole numbers, c for a forward of callable c and -c for its "
        "backward, which computes all gradients at once"
    )


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[int]:
    """Return the 1F1B order of one stage of a pipeline (0 is the first), for its one callable.

    Forwards until the last stage could have begun its first backward, then one backward after each forward, then the
    backwards that are left (PipeDream-Flush; Narayanan et al. 2021).

    Raises:
        WrongOrder: there is no such stage, or no micro-batch.
    """
    if not 0 <= stage < stages or micro_batches < 1:
        raise WrongOrder(f"stage {stage} of {stages} with {micro_batches} micro-batches: there is no such order")
    ahead = min(stages - stage - 1, micro_batches)
    return [1] * ahead + [1, -1] * (micro_batches - ahead) + [-1] * ahead


class Follower:
    """Keep where the program stands in the order, so that no graph runs when its memory belongs to another."""

    def __init__(self, order: Sequence[Event]) -> None:
        self._order = tuple(order)
        self._without: frozenset[tuple[int, int]] = frozenset()
        self.restart()

    def leave_out(self, without: Iterable[tuple[int, int]]) -> None:
        """Leave out callables and micro-batches whose backwards never come."""
        self._without = frozenset(without)

    def restart(self) -> None:
        """Begin at the first event."""
        self._place = 0
        self._skipped: set[tuple[int, int]] = set()

    @property
    def at_start(self) -> bool:
        return self._place == 0

    def micro_batch(self, number: int) -> int:
        """Return the micro-batch of a forward that is to come now.

        Raises:
            WrongOrder: another event comes now.
        """
        event = self._expected()
        if event.direction != "forward" or event.callable != number:
            raise WrongOrder(self._message(f"a forward of callable {number}", event))
        return event.micro_batch

    def forward(self, number: int, *, skip: bool = False) -> int:
        """Take in a forward; return its micro-batch. `skip`: it runs without a graph, and so does its backward.

        Raises:
            WrongOrder: another event comes now.
        """
        micro_batch = self.micro_batch(number)
        if skip:
            self._skipped.add((number, micro_batch))
        self._advance()
        return micro_batch

    def backward(self, number: int, micro_batch: int) -> None:
        """Take in a backward.

        Raises:
            WrongOrder: another event comes now.
        """
        event, here = self._expected(), Event(number, micro_batch, "backward")
        if event != here:
            message = self._message(str(here), event)
            if (event.callable, event.direction) == (number, "backward"):
                message += (
                    "; backwards of a callable come as its forwards did, so call that of each loss, not of a sum; "
                    "where one forward calls it several times, graph a function that makes all these calls"
                )
            raise WrongOrder(message)
        self._advance()

    def _expected(self) -> Event:
        return self._order[self._place]

    def _advance(self) -> None:
        """Go to the next event that a graph runs for. After the last it is the first again."""
        self._place += 1
        while self._place < len(self._order):
            event = self._order[self._place]
            key = event.callable, event.micro_batch
            if event.direction == "forward" or not (key in self._skipped or key in self._without):
                return
            self._place += 1
        self.restart()

    def _message(self, got: str, expected: Event) -> str:
        return (
            f"{got} was called, but the order has the {expected} here; graphs share memory by their order, so give "
            "graph_callables the order the program runs in, or call restart() after an iteration that was left early"
        )
