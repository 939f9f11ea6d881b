"""Calls whose cost has a period of its own: every eighth batch is larger, every fifth call waits for a log.

A block of four calls has other batches in it than the next one, and then blocks differ by more than candidates do.
Which calls are dear is learned from the times themselves, and taken out of them before candidates are compared.

Only what all candidates have in common is taken out; where they differ at a call of the period, the smallest effect
that any of them shows there. What is slow in every eighth call of one candidate only is that candidate's, and stays.
"""

from __future__ import annotations

import math
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
    numbers: dict[str, int] = {}
    candidate = np.asarray([numbers.setdefault(one.candidate, len(numbers)) for one in times])
    call = np.asarray([one.call for one in times])
    logs = np.log([one.seconds for one in times])
    middle = np.asarray([np.median(logs[candidate == number]) for number in range(len(numbers))])
    logs = np.clip(logs, middle[candidate] - OUTLIER, middle[candidate] + OUTLIER)
    plain = logs - (np.bincount(candidate, logs) / np.bincount(candidate))[candidate]
    total = float((plain**2).sum())
    if total <= 0:
        return NO_PERIOD
    lengths = np.arange(2, LONGEST + 1)
    places = call % lengths[:, None]
    enough = [
        np.bincount(place, minlength=length).min() >= FEWEST for length, place in zip(lengths, places, strict=True)
    ]
    lengths, places = lengths[enough], places[enough]
    explained = dict(zip(lengths.tolist(), _explained(logs, candidate, places, lengths, total), strict=True))
    best = max(explained.values(), default=0.0)
    if best < EXPLAINED:
        return NO_PERIOD
    length = min(length for length, share in explained.items() if share >= best - SHORTER)
    return _common(logs, candidate, call % length, length)


def _fit(logs: Floats, candidate: Integers, places: Integers, lengths: Integers) -> tuple[Floats, Floats]:
    """For periods of all these lengths a level of each candidate, and an effect of each place, that add up, by least
    squares: a row for each length, as `places` has. Behind the last place of a shorter period there are zeros.

    Candidates have not served all places equally often, so neither is a plain mean. Effects sum to nothing. All at
    once, for a fit alone is a dozen calls of numpy, which take longer than what they compute.
    """
    groups, longest = int(candidate.max()) + 1, int(lengths.max())
    shape = lengths.size, groups, longest
    cells = (np.arange(lengths.size)[:, None] * (groups * longest) + candidate * longest + places).ravel()
    served = np.bincount(cells, minlength=math.prod(shape)).reshape(shape)
    summed = np.bincount(cells, np.tile(logs, lengths.size), minlength=math.prod(shape)).reshape(shape)
    of_candidate, of_place = summed.sum(axis=2), summed.sum(axis=1)
    calls = np.maximum(served.sum(axis=1), 1)
    share = served / calls[:, None]
    left = np.eye(groups) * served.sum(axis=2)[:, None] - share @ served.transpose(0, 2, 1)
    right = of_candidate[..., None] - share @ of_place[..., None]
    # One number more in all levels, and less in all effects, fits as well: so the matrix has no inverse.
    levels = (np.linalg.pinv(left, rcond=groups * np.finfo(float).eps, hermitian=True) @ right)[..., 0]
    effects = of_place / calls - (share.transpose(0, 2, 1) @ levels[..., None])[..., 0]
    there = np.arange(longest) < lengths[:, None]
    mean = np.where(there, effects, 0.0).sum(axis=1, keepdims=True) / lengths[:, None]
    return levels + mean, np.where(there, effects - mean, 0.0)


def _explained(logs: Floats, candidate: Integers, places: Integers, lengths: Integers, total: float) -> list[float]:
    """The share of variance by length, less what as many numbers would explain by chance. `total` is the sum of
    squares without a period."""
    if not lengths.size:
        return []
    freedom = logs.size - int(candidate.max()) - lengths
    levels, effects = _fit(logs, candidate, places, lengths)
    left = logs - levels[:, candidate] - np.take_along_axis(effects, places, axis=1)
    by_chance = (logs.size - int(candidate.max()) - 1) / np.maximum(freedom, 1)
    found: list[float] = np.where(freedom > 0, 1 - (left**2).sum(axis=1) * by_chance / total, 0.0).tolist()
    return found


def _common(logs: Floats, candidate: Integers, place: Integers, length: int) -> Period:
    (levels,), (effects,) = _fit(logs, candidate, place[None], np.asarray([length]))
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
