"""Plan groups, blocks and time limits from plain values, before any process starts.

The module has times of workloads on an H200, by which budgets are planned.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeVar

from suite.measure.modes import GRAPH_MODE, REFERENCE_MODE, Mode
from suite.settings import RunSettings

_T = TypeVar("_T")

Task = Literal["inference", "training"]

DEFAULT_ESTIMATE_S: dict[tuple[str, str], float] = {
    ("full", "inference"): 170.0,
    ("full", "training"): 240.0,
    ("tiny", "inference"): 120.0,
    ("tiny", "training"): 180.0,
}
"""Most seconds of a workload in all modes, by size and task, that is not in `SLOW_S`: in full size those on an H200, in
tiny size rough upper bounds."""

SLOW_S: Mapping[str, float] = {
    "BSCG": 292.0,
    "CBERT": 988.0,
    "DALLE2": 571.0,
    "DR-I": 509.0,
    "ECML": 319.0,
    "LLAMA-G": 522.0,
    "LLAMA-G-8": 571.0,
    "MTCG-T": 349.0,
    "TEFD": 1433.0,
    "VM": 687.0,
    "WHISPER-G": 431.0,
    "XLNET-T": 448.0,
}
"""Seconds of workloads that take longer than others in full size, in `ESTIMATED_MODES` modes with three processes each
and `--measure-s 3`, compilation included. All GPUs of the host were in use: a GPU alone needs 0.4 to 0.9 of the time.
`tests/suite/run/test_schedule.py` compares both tables with recorded rows."""

ESTIMATED_MODES = 8
"""Modes that these seconds are of."""

ESTIMATE_MARGIN = 1.2
"""Safety factor of an estimate, because compile times vary between runs."""


BLOCK_US = 6000.0
"""Least total time of a block's timed samples: short, because disturbances of the host affect whole blocks."""
LEAD_IN_US = 4000.0
"""Least time of a block's lead-in: another mode has filled the caches, and the core's clock was low."""
MOST_SAMPLES = 10
MOST_LEAD_IN = 12
LEAST_LEAD_IN = 2
LONG_ITERATION_US = 20_000.0
"""Iterations that take longer need only one as lead-in: cold caches are a small part of their time."""
LONG_MEASURE_S = 5.0
"""Seconds, or `measure_s` where that is more, after which half of the least number of blocks is enough."""


def sampling_for(iteration_us: float, settings: RunSettings) -> tuple[int, int]:
    """Return the iterations of a block that is long enough, lead-in and timed ones, by the time of one."""

    def within(target_us: float, least: int, most: int) -> int:
        return max(least, min(most, math.ceil(target_us / iteration_us)))

    return (
        within(LEAD_IN_US, LEAST_LEAD_IN if iteration_us < LONG_ITERATION_US else 1, MOST_LEAD_IN),
        within(BLOCK_US, settings.samples, max(settings.samples, MOST_SAMPLES)),
    )


def least_blocks(seconds: float, settings: RunSettings) -> int:
    """Return how many blocks each process measures at least, after so many seconds: half of the setting for long ones.

    Long iterations differ between processes more than between blocks, so the time is better spent on more processes.
    """
    return settings.blocks if seconds < max(LONG_MEASURE_S, settings.measure_s) else -(-settings.blocks // 2)


def orders(names: Sequence[_T], seed: str) -> Iterator[list[_T]]:
    """Yield a random order of modes for each block, so that no mode always follows the same one."""
    generator = random.Random(seed)
    while True:
        yield generator.sample(list(names), len(names))


def halves(modes: Sequence[Mode]) -> list[list[Mode]]:
    """Return two groups for a GPU whose memory is too small for all modes; both include the main baselines.

    These are the reference and stock graphs. Modes that are adjacent in `MODES` stay together, because they are
    compared too. Return nothing where halves would be as small as pairs, or have no mode in common.
    """
    shared = [mode for mode in modes if mode.name in (REFERENCE_MODE, GRAPH_MODE)]
    others = [mode for mode in modes if mode not in shared]
    if not shared or len(modes) < 4:
        return []
    middle = len(others) // 2
    return [[*shared, *others[:middle]], [*shared, *others[middle:]]]


def estimated_seconds(workload: str, task: str, *, size: str, device: str, modes: int) -> float:
    """Return an upper estimate of the seconds of this workload in so many modes."""
    usual_s = DEFAULT_ESTIMATE_S[size, task]
    if (size, device) == ("full", "cuda"):
        usual_s = SLOW_S.get(workload, usual_s)
    return ESTIMATE_MARGIN * usual_s * max(1.0, modes / ESTIMATED_MODES)
