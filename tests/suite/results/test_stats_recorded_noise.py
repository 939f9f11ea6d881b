"""Verdicts on noise as it was recorded on an H200: how often they are wrong, missed or not reached.

Each simulated mode is a recorded cell: a block is a stretch of consecutive samples of a recorded block, so that what
slowed whole blocks then slows whole blocks here. Processes of a mode differ by a factor of their own. Neighbouring
blocks are drawn independently, as recorded neighbours are. A mode is set next to itself, as it is and 5 % faster, and
the pairs of all modes of a workload tell together how much processes differ, as in a run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from recorded_runs import paths, read_recorded

from suite.results import stats
from suite.results.schema import Status
from suite.results.stats import Verdict
from suite.results.store import list_runs, read_run
from suite.run.schedule import sampling_for
from suite.settings import USUAL_PROCESSES, RunSettings

TRIALS = 20
SETTINGS = RunSettings()
NOISE = Path(__file__).parents[2] / "data" / "recorded_noise"
"""Runs of one process with many blocks, of schema version 1."""
PROCESS_SPREAD = 0.003
"""Standard deviation of the log time of processes. Kernel times of processes with the same kernels agreed within 0.3 %
on an H200."""
BLOCK_OVERHEAD_S = 0.003
"""Taken for what a block costs next to its iterations (messages, reading the GPU's state); not measured."""


@dataclass(frozen=True, slots=True)
class Noise:
    """A recorded cell: its times in microseconds, [block, sample], and the blocks and samples that a run would take."""

    label: str
    samples_us: NDArray[np.float64]
    samples: int
    blocks: int


def recorded_noise() -> list[list[Noise]]:
    """Every cell of the recorded runs of one process that passed; those of a workload in a run together."""
    times_us: defaultdict[tuple[str, str], dict[str, NDArray[np.float64]]] = defaultdict(dict)
    for run in (*list_runs(NOISE), *paths()):
        for cell in (read_run(run) if run.parent == NOISE else read_recorded(run)).cells:
            if cell.status is Status.PASS and cell.processes == 1 and len(cell.blocks) >= 10:
                label = f"{cell.workload} {cell.mode}"
                times_us[run.name, cell.workload][label] = np.array([block.host_us for block in cell.blocks])
    found = []
    for of_workload in times_us.values():
        medians_us = {label: float(np.median(times)) for label, times in of_workload.items()}
        sampling = {label: sampling_for(us, SETTINGS) for label, us in medians_us.items()}
        # Modes take turns until the time is over.
        cycle_s = sum(BLOCK_OVERHEAD_S + us / 1e6 * sum(sampling[label]) for label, us in medians_us.items())
        blocks = int(np.clip(SETTINGS.measure_s / cycle_s, SETTINGS.blocks, SETTINGS.most_blocks))
        found.append([Noise(label, times, sampling[label][1], blocks) for label, times in of_workload.items()])
    return found


def simulate(noise: Noise, trials: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Log medians of blocks, [trial, process, block]."""
    recorded, length = noise.samples_us.shape
    samples = min(noise.samples, length)
    shape = (trials, USUAL_PROCESSES, noise.blocks)
    block = generator.integers(recorded, size=shape)
    start = generator.integers(length - samples + 1, size=shape)
    drawn = noise.samples_us[block[..., None], start[..., None] + np.arange(samples)]
    return np.log(np.median(drawn, axis=-1)) + generator.normal(0.0, PROCESS_SPREAD, (*shape[:2], 1))


def log_ratios(noise: Noise, speed_up: float, trials: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Draw ratios of a mode that is `speed_up` times as fast as the reference, [trial, process]."""
    reference, mode = simulate(noise, trials, generator), simulate(noise, trials, generator) - np.log(speed_up)
    return stats.location(reference) - stats.location(mode)


def verdicts(
    workload: Sequence[Noise], speed_up: float, trials: int, generator: np.random.Generator
) -> list[list[stats.Verdict]]:
    """Return each cell's verdicts on a mode that is so much faster, by the functions that judge runs."""
    found: list[list[stats.Verdict]] = [[] for _ in workload]
    of_pairs = np.array([log_ratios(noise, speed_up, trials, generator) for noise in workload])
    for trial in range(trials):
        spread = stats.spread_of([[own] for own in of_pairs[:, trial]], len(workload))
        for noise, own, told in zip(workload, of_pairs[:, trial], found, strict=True):
            ratio = stats.ratio_of_processes(float(own.mean()), [own], spread, noise.blocks)
            assert ratio is not None
            told.append(stats.judge(ratio))
    return found


def rates(workloads: Sequence[Sequence[Noise]], speed_up: float) -> dict[stats.Verdict, float]:
    """Return the share of each verdict over all cells."""
    generator = np.random.default_rng(1)
    total: Counter[stats.Verdict] = Counter()
    for workload in workloads:
        for found in verdicts(workload, speed_up, TRIALS, generator):
            total.update(found)
    return {verdict: total[verdict] / total.total() for verdict in stats.Verdict}


@pytest.fixture(scope="module")
def recorded() -> list[list[Noise]]:
    return recorded_noise()


@pytest.fixture(scope="module")
def cells(recorded: list[list[Noise]]) -> list[list[Noise]]:
    """Those of runs without `--tp`. Blocks of the others scatter more: next to some of them the host compiled for
    another GPU; some were alone and no better. There fewer pairs may be told apart, but few may be told wrongly."""
    found = [workload for workload in recorded if "@tp" not in workload[0].label]
    cells = [noise for workload in found for noise in workload]
    assert len(cells) > 60
    slowed = [np.ptp(np.log(np.median(noise.samples_us, axis=1))) > np.log(1.3) for noise in cells]
    assert sum(slowed) > 15, "hosts whose regimes swallow whole blocks are among them"
    return found


def test_mode_is_mostly_found_the_same_as_itself(cells: list[list[Noise]]) -> None:
    shares = rates(cells, 1.0)
    assert shares[Verdict.FAST] + shares[Verdict.SLOW] <= 0.05
    assert shares[Verdict.AMBG] <= 0.10


def test_true_five_percent_is_found(cells: list[list[Noise]]) -> None:
    shares = rates(cells, 1.05)
    assert shares[Verdict.FAST] >= 0.90
    assert shares[Verdict.SLOW] + shares[Verdict.SAME] <= 0.05
    assert shares[Verdict.AMBG] <= 0.10


def test_few_verdicts_are_wrong_with_more_scatter(recorded: list[list[Noise]]) -> None:
    scattered = [workload for workload in recorded if "@tp" in workload[0].label]
    assert sum(map(len, scattered)) > 20
    shares = rates(scattered, 1.0)
    assert shares[Verdict.FAST] + shares[Verdict.SLOW] <= 0.05
    shares = rates(scattered, 1.05)
    assert shares[Verdict.SLOW] + shares[Verdict.SAME] <= 0.05
