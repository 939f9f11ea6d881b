"""Proof by outcome: what has to be seen before a graph that reads inputs in place may stand in for the copying one.

Both graphs run on calls of the program, on the inputs of that call: the copying graph gives the result that the program
gets, the candidate runs next to it, while the placeholders of unproven inputs hold the data of an earlier call. A
pointer that was missed reads that, and shows in the outcome if the two calls differ: in the outputs, or in what the
function writes into inputs at fixed addresses.

Where two runs of the copying graph agree bit for bit, so must the candidate. Where they do not (atomic additions, say),
it must stay within `SPREAD_MARGIN` times the largest distance seen between two of them, tensor by tensor. Two runs may
be close by chance, so it takes `OBJECTIONS` calls to refuse; a wrong pointer shows in each.

Only the decision is here. `trial` does the work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

SPREAD_MARGIN = 4.0
"""Two runs understate how far runs can lie apart; a wrong pointer is off by far more than this."""

EQUAL_CALLS = 2
"""Calls with equal outcomes that a proof takes. In each of them at least one unproven input differed, and over all of
them every unproven input did."""

PATIENT_CALLS = 6
"""After so many calls with equal outcomes, inputs that held the same data in all of them are left to be copied."""

OBJECTIONS = 6
"""Calls in which the outcome is too far off, before the candidate is refused."""

MOST_CALLS = 24
"""After so many trial calls without a decision the inputs are copied, and tried again much later."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One trial call.

    Attributes:
        differed: unproven inputs whose data was not that of the earlier call.
        deviations: of the candidate's outcome from the copying graph's, tensor by tensor: 0.0 exactly where it is the
            same bit for bit, infinity where only one of the two is NaN.
        spread: the same of a second run of the copying graph; None where there was none.
    """

    differed: frozenset[int]
    deviations: tuple[float, ...]
    spread: tuple[float, ...] | None = None


class Standing(StrEnum):
    UNDECIDED = "undecided"
    PROVEN = "proven"
    PARTLY = "proven for the inputs that differed"
    REFUSED = "refused"
    GIVEN_UP = "given up"


@dataclass(slots=True)
class Proof:
    """Collects trial calls until they decide.

    Attributes:
        unproven: inputs whose uses are not known by construction.
        needs_spread: whether the next trial call has to run the copying graph twice.
        objection: why the candidate was refused or given up.
    """

    unproven: frozenset[int]
    needs_spread: bool = False
    calls: int = 0
    objection: str | None = None
    _equal: int = 0
    _objections: int = 0
    _seen: set[int] = field(default_factory=set)
    _spread: tuple[float, ...] = ()

    def add(self, observed: Observed) -> Standing:
        """Takes one call into account."""
        self.calls += 1
        if any(observed.deviations) and observed.spread is None:
            # The function may not repeat itself. Only a second run of the copying graph can tell.
            self.needs_spread = True
            return self._undecided()
        none = (0.0,) * len(observed.deviations)
        self._spread = tuple(map(max, self._spread or none, observed.spread or none))
        found = objection(self._spread, observed.deviations)
        if found is not None:
            self.objection = found
            self._objections += 1
            return Standing.REFUSED if self._objections >= OBJECTIONS else self._undecided()
        if observed.differed or not self.unproven:
            self._equal += 1
            self._seen |= observed.differed
        if self._equal >= EQUAL_CALLS and self._seen >= self.unproven:
            return Standing.PROVEN
        if self._equal >= PATIENT_CALLS and self._seen:
            return Standing.PARTLY
        return self._undecided()

    @property
    def always_the_same(self) -> frozenset[int]:
        """Unproven inputs that held the same data in every call so far."""
        return self.unproven - self._seen

    def _undecided(self) -> Standing:
        if self.calls < MOST_CALLS:
            return Standing.UNDECIDED
        same = sorted(self.always_the_same)
        what = f"input {same[0]} held the same data in each" if same else "their outcomes did not decide"
        self.objection = f"undecided after {self.calls} trial calls: {what}"
        return Standing.GIVEN_UP


def objection(repeated: Sequence[float], candidate: Collection[float]) -> str | None:
    """Why the outcome of the candidate is not that of the copying graph; None where it is."""
    if len(repeated) != len(candidate):
        raise ValueError(f"{len(candidate)} deviations of the candidate for {len(repeated)} of the copying graph")
    for place, (spread, deviation) in enumerate(zip(repeated, candidate, strict=True)):
        if spread == 0.0:
            if deviation != 0.0:
                return f"tensor {place} of the outcome differs by up to {deviation:g}, two copying runs by nothing"
        elif not math.isfinite(spread):
            return f"tensor {place} of the outcome is a number in one run of the copying graph and none in another"
        elif not deviation <= SPREAD_MARGIN * spread:
            return f"tensor {place} of the outcome differs by up to {deviation:g}, two copying runs by {spread:g}"
    return None
