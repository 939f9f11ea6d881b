"""Plan groups, blocks and time limits from plain values, before any process starts.

The module has the times of all workloads on an H200, by which budgets are planned.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from suite.measure.modes import GRAPH_MODE, REFERENCE_MODE, Mode
from suite.settings import RunSettings

_T = TypeVar("_T")

Task = Literal["inference", "training"]

DEFAULT_ESTIMATE_S: dict[tuple[str, str], float] = {
    ("full", "inference"): 150.0,
    ("full", "training"): 180.0,
    ("tiny", "inference"): 120.0,
    ("tiny", "training"): 180.0,
}
"""Assumed seconds of a workload in all modes that is not in `RECORDED_S`. In full size: somewhat more than the slowest
one that fitted on an H200 with 16 cores in the first runs. Values of tiny workloads are rough upper bounds."""

ESTIMATE_MARGIN = 1.2
"""Safety factor of an estimate from recorded seconds, because compile times vary between runs."""


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


@dataclass(frozen=True, slots=True)
class Sampling:
    """Hold a block's numbers of iterations: lead-in, and timed one by one."""

    lead_in: int
    samples: int


def sampling_for(iteration_us: float, settings: RunSettings) -> Sampling:
    """Return blocks long enough for an iteration of this length."""

    def within(target_us: float, least: int, most: int) -> int:
        return max(least, min(most, math.ceil(target_us / iteration_us)))

    return Sampling(
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
    """Return an upper estimate of the seconds of this workload in so many modes: recorded on an H200, or assumed."""
    recorded = RECORDED_S.get(workload) if (size, device) == ("full", "cuda") else None
    usual_s = DEFAULT_ESTIMATE_S[size, task] if recorded is None else recorded
    return ESTIMATE_MARGIN * usual_s * max(1.0, modes / RECORDED_MODES)


RECORDED_S: Mapping[str, int] = {
    "ALNET": 105,
    "ALNET-128": 97,
    "BERT": 193,
    "BSCG": 292,
    "CBERT": 988,
    "DALLE2": 571,
    "DBMLM": 193,
    "DBV2": 142,
    "DCGAN": 129,
    "DECODER": 137,
    "DGPT2": 236,
    "DLRM": 116,
    "DMLM": 222,
    "DMLM-16": 220,
    "DNET": 154,
    "DR-I": 509,
    "DR-I-256": 115,
    "DR-T": 139,
    "DR-T-4096": 234,
    "ECML": 319,
    "EOS": 87,
    "GFNET": 187,
    "LCNET": 129,
    "LLAMA-G": 522,
    "LLAMA-G-8": 571,
    "LP": 138,
    "MBERT": 145,
    "MMC": 153,
    "MTCG-I": 150,
    "MTCG-T": 349,
    "ST": 159,
    "STCLM": 187,
    "TEFD": 1433,
    "TKE": 135,
    "VM": 687,
    "WHISPER-G": 431,
    "XLNET-I": 168,
    "XLNET-I-8": 163,
    "XLNET-T": 448,
}
"""Seconds by workload in full size, from the first `started_at` of its rows to the last `started_at` + `wall_s`, with
compilation; eight modes (DMLM-16 and ECML: ten, with `step` and `callables`), three processes each, `--measure-s 3`. Of
the newest recorded run in which all modes were timed: DR-I of 20261127-083937-h200-dr-i, and DMLM-16, ECML and LLAMA-G
of 20261127-083937-h200, with four GPUs of a host used at the same time; all others of 20261127-013319-h200, with eight.
DR-I was measured in pairs, and ECML and DMLM-16 in halves. A GPU alone on its
host needs less: earlier runs with none to three others took 0.6 of the seconds of the eight on average, 0.4 (DCGAN) to
0.9 (TEFD). So there `--budget` may postpone a workload that would have fitted, but starts none that does not fit.
`tests/suite/run/test_schedule.py` compares these values with the rows."""

RECORDED_MODES = 8
"""Modes that these seconds are of."""
