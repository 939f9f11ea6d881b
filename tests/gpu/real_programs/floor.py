"""The speed floor: how fast Encore is over plain compile and over stock's graphs, with intervals over processes.

A process may be a third slower than another of the same program on the same day. So a program counts as slow only if
the interval of its ratio over several processes lies below the floor as a whole.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from real_programs.rows import PLAIN, STOCK, Row

OURS = "encore"
FLOOR = 0.95
FEWEST = 3
"""Processes that an interval needs."""

REFERENCES: Mapping[str, str] = {PLAIN: "compile", STOCK: "graph"}
"""Modes that Encore is compared with, and the suite's names for them."""


class Speed(NamedTuple):
    """Hold a speed-up by Encore: an estimate, and its interval with 95 % confidence."""

    estimate: float
    low: float
    high: float
    processes: int

    def __str__(self) -> str:
        bounds = f" [{self.low:.2f}, {self.high:.2f}]" if math.isfinite(self.high) else ""
        return f"{self.estimate:.2f}{bounds}"


Speeds = Mapping[tuple[str, str], Speed]
"""Speeds by program and reference."""


def speed_of(ratios: Sequence[float]) -> Speed:
    """Return the geometric mean with its 95 % interval by Student's t; unbounded with fewer than `FEWEST` ratios."""
    logs = [math.log(value) for value in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < FEWEST:
        return Speed(math.exp(mean), 0.0, math.inf, len(logs))
    from scipy.stats import t

    half = float(t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Speed(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def ratio(row: Row, reference: Row | None) -> float | None:
    """Return how many times faster `row` is than `reference` per call: the median over rounds they both had."""
    if reference is None or row["status"] != "ok" or reference["status"] != "ok":
        return None
    rounds = list(zip(reference["turns_us"], row["turns_us"], strict=False))
    return statistics.median(there / here for there, here in rounds) if rounds else None


def by_process(runs: Iterable[Iterable[Row]]) -> list[list[Row]]:
    """Return the rows of each process of each run; a later row of a program and mode stands for an earlier one."""
    found: dict[tuple[int, int], dict[tuple[str, str], Row]] = {}
    for number, rows in enumerate(runs):
        for row in rows:
            process = found.setdefault((number, row.get("process", 1)), {})
            process[row["program"], row["mode"]] = row
    return [list(rows.values()) for rows in found.values()]


def speeds(processes: Iterable[Sequence[Row]]) -> Speeds:
    """Return the speeds of all programs over each reference."""
    found: dict[tuple[str, str], list[float]] = {}
    for rows in processes:
        by_key = {(row["program"], row["mode"]): row for row in rows}
        for program in (program for program, mode in by_key if mode == OURS):
            for reference in REFERENCES:
                value = ratio(by_key[program, OURS], by_key.get((program, reference)))
                if value is not None:
                    found.setdefault((program, reference), []).append(value)
    return {key: speed_of(values) for key, values in found.items()}


def brief(found: Speeds) -> list[str]:
    """Return paragraphs: Encore's speed over plain compile and stock, means, and which programs are slow."""
    programs = []
    for program in dict.fromkeys(program for program, _ in found):
        of = [found.get((program, reference)) for reference in REFERENCES]
        programs.append(f"{program} {' / '.join(str(one) if one else 'no result' for one in of)}")
    means = [
        f"over {name} {statistics.geometric_mean(of):.2f} (of {len(of)})"
        for reference, name in REFERENCES.items()
        if (of := [one.estimate for (_, its), one in found.items() if its == reference])
    ]
    judged = sum(one.processes >= FEWEST for (_, reference), one in found.items() if reference == PLAIN)
    said = slow(found) or [f"None of the {judged} programs with {FEWEST} processes is slow."]
    return [f"{'; '.join(programs)}.", f"Geometric means: {', '.join(means)}.", *said]


def slow(found: Speeds) -> list[str]:
    """Return the programs that are slow."""
    return [
        f"SLOW: {program}, {OURS}: {one} of plain compile's speed, below {FLOOR}"
        for (program, reference), one in found.items()
        if reference == PLAIN and one.high < FLOOR
    ]
