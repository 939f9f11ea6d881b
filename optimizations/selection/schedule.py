"""Who serves which call: blocks of consecutive calls, one for each candidate in each round, in a drawn order.

The order of every second round is the one before reversed, so that a drift within rounds cancels in pairs. It is drawn,
because a program's calls may have a period of their own (two shapes of batch in turn), which a fixed order could meet.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """One call that is measured: `place` counts calls within the block of `candidate` in round `round`."""

    round: int
    candidate: str
    place: int


def turns(candidates: Sequence[str], round_index: int, block_calls: int, seed: int) -> tuple[Turn, ...]:
    """The calls of one round, in order. The same arguments give the same turns."""
    drawn = random.Random(f"{seed}:{round_index // 2}")
    order = sorted(candidates)
    drawn.shuffle(order)
    if round_index % 2:
        order.reverse()
    return tuple(Turn(round_index, candidate, place) for candidate in order for place in range(block_calls))
