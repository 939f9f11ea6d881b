"""Numbers of Python that tell calls of one signature apart before there is a recording.

A recording knows what it has read in Python, and serves calls for which that is the same. Before there is one, calls
are looked at in a row, and two that differ stand in the way of a graph of either: with a flag that is set in every
third call (`if trainer.last: optimizer.step()`), no two in a row agree and are followed by a third that does. So where
calls differ for good, it is asked which numbers changed when they differed, and never while they agreed. Each value of
these has its own row of calls from then on, up to `MOST_KINDS`. What is another in each call is refused: of numbers
that decide, a value came again after another.

Calls that cannot be captured (`if trainer.last: print(loss.item())`) differ from those that can, in the same way.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from optimizations.capture.step.changing_values import Numbers, advice_on
from optimizations.capture.step.host_state import Place
from optimizations.report.steps import Refusal

MOST_KINDS = 8
"""Values by which calls of a signature are told apart. What has more is another in each call, as a rule."""
MOST_TIMES = 3
"""How often it may turn out that calls of a signature still differ, by numbers that had not changed so far."""
MOST_CALLS = 16
"""Of which numbers are kept. There are fewer where none is passed over."""


@dataclass(slots=True)
class Suspects:
    """The numbers of calls that were looked at one after the other, and which changed when they differed."""

    calls: deque[Numbers] = field(default_factory=lambda: deque(maxlen=MOST_CALLS))
    differed: set[frozenset[Place]] = field(default_factory=set)
    agreed: frozenset[Place] = frozenset()

    def note(self, numbers: Numbers, *, agrees: bool | None) -> None:
        """Take in a call, and whether it did what the one before did; None where that is not known."""
        before = self.calls[-1] if self.calls else {}
        self.calls.append(numbers)
        if agrees is None:
            return
        places = frozenset(place for place in before.keys() | numbers.keys() if before.get(place) != numbers.get(place))
        if agrees:
            self.agreed |= places
        elif len(self.differed) < MOST_CALLS:
            self.differed.add(places)

    def found(self) -> tuple[Place, ...]:
        """Those that changed when calls differed, and never while they agreed: whenever they did, or else as few as
        there are one of each time. None if they are an optimizer's, which can be told how to take numbers that
        change."""
        if not (changed := self.changed()):
            return ()
        told = frozenset(place for place in changed - self._moved() if self._comes_again([place]))
        left = [places & told for places in self.differed]
        places = frozenset.intersection(*left) or _one_of_each(left)
        names = {numbers[place][0] for numbers in self.calls for place in places if place in numbers}
        return tuple(places) if self._comes_again(places) and advice_on(names) is None else ()

    def changed(self) -> frozenset[Place]:
        """All that changed when calls differed, and never while they agreed."""
        return frozenset[Place]().union(*self.differed) - self.agreed

    def _moved(self) -> set[Place]:
        """Those that stand elsewhere in some calls, in another container of the same name: nothing is known of them,
        and what stands there now may be something else."""
        by_name: defaultdict[str, set[Place]] = defaultdict(set)
        for numbers in self.calls:
            for place, (name, _) in numbers.items():
                by_name[name].add(place)
        return {place for places in by_name.values() if len(places) > 1 for place in places}

    def _comes_again(self, places: Iterable[Place]) -> bool:
        """Whether a value that stands there came again after another."""
        values = [values_at(places, numbers) for numbers in self.calls]
        rows = [value for value, before in zip(values, [None, *values], strict=False) if value != before]
        return len(set(rows)) < len(rows)


def _one_of_each(some: list[frozenset[Place]]) -> frozenset[Place]:
    """Few places, of which each of these has one; none if there are no such."""
    found: set[Place] = set()
    while left := [places for places in some if found.isdisjoint(places)]:
        if not all(left):
            return frozenset()
        found.add(max(every := [place for places in left for place in places], key=every.count))
    return frozenset(found)


def values_at(places: Iterable[Place], numbers: Numbers) -> tuple[Hashable, ...]:
    """The values that a call with these numbers has there; None where there is none."""
    return tuple([numbers[place][1] if place in numbers else None for place in places])


@dataclass(slots=True)
class _ToldApart:
    """Where the numbers stand by which calls of a signature are told apart, the refusal that this is instead of, how
    often such places were found, and the values that were met there since the last time."""

    places: tuple[Place, ...]
    refusal: Refusal
    times: int
    met: set[Hashable] = field(default_factory=set)


@dataclass(slots=True)
class DecidingValues:
    """What calls are told apart by, for each signature."""

    _of: dict[Hashable, _ToldApart] = field(default_factory=dict)

    def tell_apart(self, signature: Hashable, suspects: Suspects, refusal: Refusal) -> bool:
        """Calls of this signature differ for good, by this `refusal`; whether they are told apart from now on instead,
        or by more than so far."""
        known = self._of.get(signature)
        places, times = ((), 0) if known is None else (known.places, known.times)
        more = tuple(place for place in suspects.found() if place not in places)
        if not more or times >= MOST_TIMES:
            return False
        self._of[signature] = _ToldApart((*places, *more), refusal, times + 1)
        return True

    def known(self, signature: Hashable) -> bool:
        """Whether calls of this signature are told apart."""
        return signature in self._of

    def of(self, signature: Hashable, numbers: Numbers) -> tuple[Hashable, ...]:
        """The values that a call with these numbers has there."""
        told = self._of[signature]
        values = values_at(told.places, numbers)
        if len(told.met) <= MOST_KINDS:
            told.met.add(values)
        return values

    def too_many(self, signature: Hashable) -> Refusal | None:
        """Why calls are not looked at any more: more values were met than is worth a graph each."""
        told = self._of[signature]
        return told.refusal if len(told.met) > MOST_KINDS else None
