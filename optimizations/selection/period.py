"""Calls whose cost has a period of its own: every eighth batch is larger, every fifth call waits for a log.

A block of four calls has other batches in it than the next one, and then blocks differ by more than candidates do.
Which calls are dear is learned from the times themselves, and taken out of them before candidates are compared.

Only what all candidates have in common is taken out; where they differ at a call of the period, the smallest effect
that any of them shows there. What is slow in every eighth call of one candidate only is that candidate's, and stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LONGEST = 32
"""Calls of a period that is looked for."""

FEWEST = 3
"""Times for each call of a period before anything is said of it."""

MOST = 900
"""Times that are looked at, the last ones. More say hardly more, and looking takes the program's time."""

EXPLAINED = 0.75
"""Share of the variance of logarithms that a period has to explain. Less is noise like other noise, for which there
are rounds."""

SHORTER = 0.02
"""What a longer period has to explain more, or a multiple of the true one would do as well."""

OUTLIER = 2.0
"""A logarithm further than this from its candidate's median counts as that far."""


OWN_SHARE, OWN = 0.3, 0.1
"""What a candidate's effect may differ from all candidates' together, as a share of it and as a logarithm; beyond that
it is its own."""

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Timed:
    """A call of the program by its number, who served it, and how long it took."""

    call: int
    candidate: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Period:
    """What is common to all candidates, by place in the period.

    Attributes:
        ratios: times the time of a call in the middle of these; their logarithms sum to nothing.
        offsets: seconds more than the mean call; they sum to nothing.
    """

    ratios: tuple[float, ...]
    offsets: tuple[float, ...]

    def ratio(self, call: int) -> float:
        return self.ratios[call % len(self.ratios)]

    def offset_s(self, call: int) -> float:
        """What is taken out of a call's time where sums are compared. It is the same whoever serves it, so that the
        difference of two sums stays as it is, and only its noise goes."""
        return self.offsets[call % len(self.offsets)]


NO_PERIOD = Period((1.0,), (0.0,))


def period_of(times: Sequence[Timed]) -> Period:
    """The period that explains these times; `NO_PERIOD` where none explains enough."""
    times = times[-MOST:]
    if not times:
        return NO_PERIOD
    names, candidate = np.unique([one.candidate for one in times], return_inverse=True)
    call = np.asarray([one.call for one in times])
    logs = np.log([one.seconds for one in times])
    middle = np.asarray([np.median(logs[candidate == number]) for number in range(names.size)])
    logs = np.clip(logs, middle[candidate] - OUTLIER, middle[candidate] + OUTLIER)
    plain = logs - (np.bincount(candidate, logs) / np.bincount(candidate))[candidate]
    total = float((plain**2).sum())
    explained = {
        length: _explained(logs, candidate, call % length, total)
        for length in range(2, LONGEST + 1)
        if np.bincount(call % length, minlength=length).min() >= FEWEST
    }
    best = max(explained.values(), default=0.0)
    if best < EXPLAINED:
        return NO_PERIOD
    length = min(length for length, share in explained.items() if share >= best - SHORTER)
    return _common(logs, candidate, call % length, length)


def _fit(logs: Floats, candidate: Integers, place: Integers) -> tuple[Floats, Floats]:
    """A level of each candidate and an effect of each place that add up, by least squares.

    Candidates have not served all places equally often, so neither is a plain mean. Effects sum to nothing.
    """
    groups, length = int(candidate.max()) + 1, int(place.max()) + 1
    served = np.bincount(candidate * length + place, minlength=groups * length).reshape(groups, length)
    share = served / np.maximum(served.sum(axis=0), 1)
    of_candidate, of_place = np.bincount(candidate, logs), np.bincount(place, logs, minlength=length)
    levels = np.linalg.lstsq(
        np.diag(served.sum(axis=1)) - share @ served.T, of_candidate - share @ of_place, rcond=None
    )[0]
    effects = of_place / np.maximum(served.sum(axis=0), 1) - share.T @ levels
    return levels + effects.mean(), effects - effects.mean()


def _explained(logs: Floats, candidate: Integers, place: Integers, total: float) -> float:
    """The share of variance, less what as many numbers would explain by chance. `total` is the sum of squares without
    a period."""
    groups, length = int(candidate.max()) + 1, int(place.max()) + 1
    freedom = logs.size - groups - length + 1
    if freedom <= 0 or total <= 0:
        return 0.0
    levels, effects = _fit(logs, candidate, place)
    left = logs - levels[candidate] - effects[place]
    return 1 - float((left**2).sum()) / freedom * (logs.size - groups) / total


def _common(logs: Floats, candidate: Integers, place: Integers, length: int) -> Period:
    levels, effects = _fit(logs, candidate, place)
    relative = logs - levels[candidate]
    for index in range(length):
        of_each = [
            float(np.median(found))
            for number in range(levels.size)
            if (found := relative[(candidate == number) & (place == index)]).size
        ]
        together = effects[index]
        if any(abs(one - together) > OWN_SHARE * abs(together) + OWN for one in of_each):
            alike = all(one > 0 for one in of_each) or all(one < 0 for one in of_each)
            effects[index] = min(of_each, key=abs) if alike else 0.0
    effects -= effects.mean()
    offsets = float(np.exp(levels.min())) * np.exp(effects)
    return Period(tuple(np.exp(effects).tolist()), tuple((offsets - offsets.mean()).tolist()))
