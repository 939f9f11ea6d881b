"""Plan the graphs of callables from the order in which a program runs them forward and backward. Pure.

`[1, 1, 2, 2, -2, -2, -1, -1]`: two forwards of callable 1, two of callable 2, then their backwards. The n-th -c is the
backward of the n-th c, as in the schedules of Megatron and Transformer Engine.

The tensors that a forward saves are live until its backward. So a callable needs as many pairs of graphs as it has
micro-batches in flight. The order decides nothing else: each launch is preceded by a check that no tensor in the memory
of its graphs is needed any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward"]


class WrongOrder(ValueError):
    """Report an order that no training loop can follow."""


@dataclass(frozen=True, slots=True)
class Event:
    """Name a forward or backward of a callable (numbered from 1).

    Attributes:
        variant: index of the sample whose signature its arguments have.
        micro_batch: index of the forward, or of the forward to which the backward belongs.
    """

    callable: int
    direction: Direction
    variant: int = 0
    micro_batch: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Plan one pair of graphs: the `index`-th of those in flight for a callable and variant."""

    callable: int
    variant: int
    index: int


def events(order: Iterable[int], callables: int) -> tuple[Event, ...]:
    """Return an order as events. Either every forward has its backward or none has.

    Raises:
        WrongOrder: it has an unknown callable, lacks one, or has a backward before its forward. The message names the
            entry.
    """
    found: list[Event] = []
    counts: Counter[int] = Counter()
    for place, entry in enumerate(order):
        if type(entry) is not int:
            raise WrongOrder(
                f"order[{place}] is {entry!r}: entries are whole numbers, c for a forward of callable c and -c for its "
                "backward, which computes all gradients at once"
            )
        if not 1 <= abs(entry) <= callables:
            raise WrongOrder(f"order[{place}] is {entry}, but callables go from 1 to {callables}")
        if entry < 0 and counts[entry] >= counts[-entry]:
            raise WrongOrder(f"order[{place}] is {entry}, but no forward of callable {-entry} is without backward")
        found.append(Event(abs(entry), "forward" if entry > 0 else "backward", micro_batch=counts[entry]))
        counts[entry] += 1
    trains = any(entry < 0 for entry in counts)
    for number in range(1, callables + 1):
        if not counts[number]:
            raise WrongOrder(f"the order does not run callable {number}")
        if trains and counts[number] != counts[-number]:
            raise WrongOrder(
                f"callable {number} has {counts[number]} forwards and {counts[-number]} backwards; each forward needs "
                "one, or none of any callable"
            )
    return tuple(found)


def plan_graphs(order: Sequence[Event], *, in_step: bool = False) -> tuple[Place, ...]:
    """Return the pairs of graphs that an order needs, callable by callable.

    Args:
        in_step: all callables have the same number of pairs, because pairs of one index read each other's results.
    """
    have_backward = {(one.callable, one.micro_batch) for one in order if one.direction == "backward"}
    alive: Counter[tuple[int, int]] = Counter()
    most: dict[tuple[int, int], int] = {}
    for event in order:
        of = event.callable, event.variant
        if (event.callable, event.micro_batch) in have_backward:
            alive[of] += 1 if event.direction == "forward" else -1
        most[of] = max(most.get(of, 1), alive[of])
    if in_step:
        most = dict.fromkeys(most, max(most.values()))
    return tuple(Place(*of, index) for of, count in most.items() for index in range(count))
