"""Plan the graphs of callables from the order in which a program runs them forward and backward. Pure.

`[1, 1, 2, 2, -2, -2, -1, -1]`: two forwards of callable 1, two of callable 2, then their backwards. The n-th -c is the
backward of the n-th c, as in the schedules of Megatron and Transformer Engine.

The tensors that a forward saves are live until its backward. So a callable needs as many pairs of graphs as it has
micro-batches in flight, and pairs of different callables whose lifetimes do not overlap share a memory pool. The order
decides nothing else: each launch is preceded by a check that no tensor in the pool is needed any more.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Direction = Literal["forward", "backward"]


class WrongOrder(ValueError):
    """Report an order that no training loop can follow."""


@dataclass(frozen=True, slots=True)
class Event:
    """Name a forward or backward of a callable (numbered from 1).

    Attributes:
        variant: index of the sample whose signature its arguments have.
        micro_batch: index of the forward, or of the forward to which the backward belongs.
        has_backward: for a forward, whether its backward is among the events.
    """

    callable: int
    direction: Direction
    variant: int = 0
    micro_batch: int = 0
    has_backward: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """Plan one pair of graphs: the `index`-th of those in flight for a callable and variant, in a pool."""

    callable: int
    variant: int
    index: int
    pool: int


def events(order: Iterable[int], callables: int) -> tuple[Event, ...]:
    """Return an order as events. Either every forward has its backward or none has.

    Raises:
        WrongOrder: it has an unknown callable, lacks one, or has a backward before its forward. The message names the
            entry.
    """
    entries = [_checked(place, given, callables, "callables") for place, given in enumerate(order)]
    trains = any(entry < 0 for entry in entries)
    found: list[Event] = []
    counts: Counter[int] = Counter()
    for place, entry in enumerate(entries):
        if entry < 0 and counts[entry] >= counts[-entry]:
            raise WrongOrder(f"order[{place}] is {entry}, but no forward of callable {-entry} is without backward")
        direction: Direction = "forward" if entry > 0 else "backward"
        found.append(Event(abs(entry), direction, micro_batch=counts[entry], has_backward=trains))
        counts[entry] += 1
    for number in range(1, callables + 1):
        if not counts[number]:
            raise WrongOrder(f"the order does not run callable {number}")
        if trains and counts[number] != counts[-number]:
            raise WrongOrder(
                f"callable {number} has {counts[number]} forwards and {counts[-number]} backwards; each forward needs "
                "one, or none of any callable"
            )
    return tuple(found)


def default_order(callables: int, *, training: bool = True) -> list[int]:
    """Return all forwards, then all backwards in reverse, for one micro-batch."""
    forward = list(range(1, callables + 1))
    return forward + [-number for number in reversed(forward)] if training else forward


def expanded(order: Iterable[int], sizes: Sequence[int]) -> list[int]:
    """Return an order of chunks as an order of their layers: chunk c has `sizes[c - 1]` layers.

    Raises:
        WrongOrder: it has an unknown chunk.
    """
    first = [1, *itertools.accumulate(sizes, initial=1)][1:]
    found: list[int] = []
    for place, given in enumerate(order):
        entry = _checked(place, given, len(sizes), "chunks")
        layers = range(first[abs(entry) - 1], first[abs(entry)])
        found += layers if entry > 0 else [-layer for layer in reversed(layers)]
    return found


def _checked(place: int, entry: Any, count: int, what: str) -> int:
    if type(entry) is not int:
        raise WrongOrder(
            f"order[{place}] is {entry!r}: entries are whole numbers, c for a forward of callable c and -c for its "
            "backward, which computes all gradients at once"
        )
    if not 1 <= abs(entry) <= count:
        raise WrongOrder(f"order[{place}] is {entry}, but {what} go from 1 to {count}")
    return entry


_Span = tuple[int, float]
"""Positions of a forward and its backward in the order, both included."""
_Key = tuple[int, int, int]
"""Callable, variant, index."""


def plan_graphs(order: Sequence[Event], *, in_step: bool = False) -> tuple[Place, ...]:
    """Return the pairs of graphs that an order needs, in the order of their first forwards.

    Args:
        in_step: all callables have the same number of pairs, each in a separate pool, because pairs of one index read
            each other's results.
    """
    spans: dict[_Key, list[_Span]] = {}
    alive: dict[tuple[int, int], tuple[_Key, int]] = {}
    for at, event in enumerate(order):
        of = event.callable, event.micro_batch
        if event.direction == "backward":
            key, begin = alive.pop(of)
            spans[key].append((begin, at))
            continue
        taken = {key for key, _ in alive.values()}
        keys = ((event.callable, event.variant, index) for index in itertools.count())
        key = next(key for key in keys if key not in taken)
        spans.setdefault(key, [])
        if event.has_backward:
            alive[of] = key, at
        else:  # its results are live as long as the program references them
            spans[key].append((-1, float("inf")))
    if in_step:
        most = max(index for _, _, index in spans) + 1
        several = dict.fromkeys((one, variant, index) for index in range(most) for one, variant, _ in spans)
        return tuple(Place(*key, pool) for pool, key in enumerate(several))
    pools: list[list[_Span]] = []
    found = []
    for key, mine in spans.items():
        free = (number for number, theirs in enumerate(pools) if not _overlap(mine, theirs))
        if (pool := next(free, len(pools))) == len(pools):
            pools.append([])
        pools[pool] += mine
        found.append(Place(*key, pool))
    return tuple(found)


def _overlap(some: Iterable[_Span], others: Sequence[_Span]) -> bool:
    return any(begin <= until and since <= end for begin, end in some for since, until in others)
