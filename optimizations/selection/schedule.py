"""Who serves which call: blocks of consecutive calls, one for each candidate in each round, in a drawn order.

Note [Drawn orders]. A program's calls may have a period of their own (batches of two sizes in turn), which a fixed
order could meet: one candidate would have the small ones. The order of each round is drawn without regard to any other.
Whatever happens in a round's calls, a period, drift, a slow regime of the host, then speaks for either of two
candidates with the same probability, in each round anew, and that is what the interval supposes. An order that reverses
the one before lets a drift cancel in pairs, but where a period is as long as two rounds it shows the same difference
twice: 12 rounds said no more than 6.
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
    order = sorted(candidates)
    random.Random(f"{seed}:{round_index}").shuffle(order)
    return tuple(Turn(round_index, candidate, place) for candidate in order for place in range(block_calls))
