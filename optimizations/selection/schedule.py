"""Who serves which call: blocks of consecutive calls, one for each candidate in each round, in a drawn order.

Note [Drawn orders]. A program's calls may have a period of their own (batches of two sizes in turn), which a fixed
order could meet: one candidate would have the small ones. So the order of each round is drawn on its own. A period, a
drift or a slow host then helps either of two candidates with equal chances in every round. The interval supposes just
that. Reversing the order in every second round lets a drift cancel. But where a period is as long as two rounds, it
shows the same difference twice: 12 rounds said no more than 6.

Nor are rounds all of one length. Blocks of four calls, and rounds of eight, would begin at the same call of a period of
two, four or eight each time, and that call would never count. So every third round or so, as it is drawn, is one call
longer; that one does not count.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

LONGER = 0.3
"""How probable it is that a round is one call longer. Note [Drawn orders]."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One call that is measured: `place` counts calls within the block of `candidate` in round `round`, and `call` the
    program's."""

    round: int
    candidate: str
    place: int
    call: int = 0


def turns(candidates: Sequence[str], round_index: int, block_calls: int, seed: int) -> tuple[Turn, ...]:
    """The calls of one round, in order; a last one may be behind its block. The same arguments give the same turns."""
    order, chance = sorted(candidates), random.Random(f"{seed}:{round_index}")
    chance.shuffle(order)
    made = [Turn(round_index, candidate, place) for candidate in order for place in range(block_calls)]
    if chance.random() < LONGER:
        made.append(Turn(round_index, order[-1], block_calls))
    return tuple(made)
