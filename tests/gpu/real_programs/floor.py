"""The speed floor: how fast Encore is over plain compile and over stock's graphs, with intervals over processes.

A process may be a third slower than another of the same program on the same day. So a program counts as slow only if
the interval of its ratio over several processes lies below the floor as a whole.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from real_programs.rows import OTHERS, PLAIN, STOCK, Row, ratio

FLOOR = 0.95
FEWEST = 3
"""Processes that an interval needs."""

REFERENCES: Mapping[str, str] = {PLAIN: "compile", STOCK: "graph"}
"""Modes that others are compared with, and the suite's names for them."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate, and bounds between which the true value lies with 95 % confidence."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Speed:
    """One mode of one program over a reference: the ratio in each process, more than 1 where the mode is faster."""

    program: str
    mode: str
    reference: str
    ratios: tuple[float, ...]

    @property
    def interval(self) -> Interval:
        return log_interval(self.ratios)

    @property
    def slow(self) -> bool:
        return self.reference == PLAIN and self.interval.high < FLOOR


def log_interval(ratios: Sequence[float]) -> Interval:
    """Return the geometric mean with its 95 % interval by Student's t; unbounded with fewer than `FEWEST` ratios."""
    logs = [math.log(value) for value in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < FEWEST:
        return Interval(math.exp(mean), 0.0, math.inf)
    from scipy.stats import t

    half = float(t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def by_process(runs: Iterable[Iterable[Row]]) -> list[list[Row]]:
    """Return the rows of each process of each run; a later row of a program and mode stands for an earlier one."""
    found: dict[tuple[int, int], dict[tuple[str, str], Row]] = {}
    for number, rows in enumerate(runs):
        for row in rows:
            process = found.setdefault((number, row.get("process", 1)), {})
            process[row["program"], row["mode"]] = row
    return [list(rows.values()) for rows in found.values()]


def speeds(processes: Iterable[Sequence[Row]]) -> list[Speed]:
    """Return the speeds of all programs in the modes that are to be judged, over each reference."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for rows in processes:
        by_key = {(row["program"], row["mode"]): row for row in rows}
        for (program, mode), row in by_key.items():
            for reference in REFERENCES if mode not in OTHERS else ():
                value = ratio(row, by_key.get((program, reference)))
                if value is not None:
                    found.setdefault((program, mode, reference), []).append(value)
    return [Speed(*key, tuple(values)) for key, values in found.items()]


def brief(processes: Sequence[Sequence[Row]]) -> list[str]:
    """Return paragraphs: Encore's speed over plain compile and stock in these processes, means, and which are slow."""
    found = [one for one in speeds(processes) if one.mode == "encore"]
    by_key = {(one.program, one.reference): one for one in found}
    programs = []
    for program in dict.fromkeys(one.program for one in found):
        of = [by_key.get((program, reference)) for reference in REFERENCES]
        programs.append(f"{program} {' / '.join(_bounds(one.interval) if one else 'no result' for one in of)}")
    means = [
        f"over {name} {statistics.geometric_mean(of):.2f} (of {len(of)})"
        for reference, name in REFERENCES.items()
        if (of := [one.interval.estimate for one in found if one.reference == reference])
    ]
    judged = sum(len(one.ratios) >= FEWEST for one in found if one.reference == PLAIN)
    said = slow(found) or [f"None of the {judged} programs with {FEWEST} processes is slow."]
    return [f"{'; '.join(programs)}.", f"Geometric means: {', '.join(means)}.", *said]


def slow(found: Iterable[Speed]) -> list[str]:
    """Return the programs that are slow."""
    return [
        f"SLOW: {one.program}, {one.mode}: {_bounds(one.interval)} of plain compile's speed, below {FLOOR}"
        for one in found
        if one.slow
    ]


def _bounds(found: Interval) -> str:
    if not math.isfinite(found.high):
        return f"{found.estimate:.2f}"
    return f"{found.estimate:.2f} [{found.low:.2f}, {found.high:.2f}]"
