"""Numbers of Python that tell calls of one signature apart before there is a recording.

A recording knows what it has read in Python, and serves calls for which that is the same. Before there is one, calls
are looked at in a row, and two that differ stand in the way of a graph of either: with a flag that is set in every
third call (`if trainer.last: optimizer.step()`), no two in a row agree and are followed by a third that does. So where
calls differ for good, it is asked which numbers changed whenever they differed, and never while they agreed. If a value
of these came again after another, each value has its own row of calls from then on, up to `MOST_KINDS`. What is another
in each call is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from optimizations.capture.step.changing_values import Numbers, advice_on
from optimizations.capture.step.host_state import Place
from optimizations.report.steps import Refusal

MOST_KINDS = 8
"""Values by which calls of a signature are told apart. What has more is another in each call, as a rule."""


@dataclass(slots=True)
class Suspects:
    """The numbers of calls that were looked at one after the other, and which changed when they differed."""

    calls: list[Numbers] = field(default_factory=list)
    differed: frozenset[Place] | None = None
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
        else:
            self.differed = places if self.differed is None else self.differed & places

    def found(self) -> tuple[Place, ...]:
        """Those that changed whenever calls differed, and never while they agreed; none if no value came again, nor if
        they are an optimizer's, which can be told how to take numbers that change."""
        places = tuple((self.differed or frozenset()) - self.agreed)
        names = {numbers[place][0] for numbers in self.calls for place in places if place in numbers}
        if advice_on(names) is not None:
            return ()
        values = [values_at(places, numbers) for numbers in self.calls]
        rows = [value for value, before in zip(values, [None, *values], strict=False) if value != before]
        return places if len(set(rows)) < len(rows) else ()


def values_at(places: Iterable[Place], numbers: Numbers) -> tuple[Hashable, ...]:
    """The values that a call with these numbers has there; None where there is none."""
    return tuple([numbers[place][1] if place in numbers else None for place in places])


@dataclass(slots=True)
class DecidingValues:
    """What calls are told apart by, for each signature."""

    _places: dict[Hashable, tuple[Place, ...]] = field(default_factory=dict)
    _refusals: dict[Hashable, Refusal] = field(default_factory=dict)
    _met: dict[Hashable, set[Hashable]] = field(default_factory=dict)

    def tell_apart(self, signature: Hashable, suspects: Suspects, refusal: Refusal) -> bool:
        """Calls of this signature differ for good, by this `refusal`; whether they are told apart from now on instead.
        Once for each signature."""
        if signature in self._places or not (places := suspects.found()):
            return False
        self._places[signature], self._refusals[signature], self._met[signature] = places, refusal, set()
        return True

    def known(self, signature: Hashable) -> bool:
        """Whether calls of this signature are told apart."""
        return signature in self._places

    def of(self, signature: Hashable, numbers: Numbers) -> tuple[Hashable, ...]:
        """The values that a call with these numbers has there."""
        values = values_at(self._places[signature], numbers)
        self._met[signature].add(values)
        return values

    def too_many(self, signature: Hashable) -> Refusal | None:
        """Why calls are not looked at any more: more values were met than is worth a graph each."""
        return self._refusals[signature] if len(self._met.get(signature, ())) > MOST_KINDS else None
