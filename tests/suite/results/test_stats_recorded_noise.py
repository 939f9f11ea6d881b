"""Verdicts on noise as it was recorded on an H200: wrong ones, missed ones, and none. See `noise_simulation`."""

from __future__ import annotations

import numpy as np
import pytest
from noise_simulation import Noise, rates, recorded_noise

from suite.results.stats import Verdict

TRIALS = 20


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


def test_a_mode_is_mostly_found_the_same_as_itself(cells: list[list[Noise]]) -> None:
    shares, _ = rates(cells, 1.0, TRIALS)
    assert shares[Verdict.FAST] + shares[Verdict.SLOW] <= 0.05
    assert shares[Verdict.AMBG] <= 0.10


def test_a_true_five_percent_is_found(cells: list[list[Noise]]) -> None:
    shares, _ = rates(cells, 1.05, TRIALS)
    assert shares[Verdict.FAST] >= 0.90
    assert shares[Verdict.SLOW] + shares[Verdict.SAME] <= 0.05
    assert shares[Verdict.AMBG] <= 0.10


def test_where_blocks_scatter_more_few_are_told_wrongly(recorded: list[list[Noise]]) -> None:
    scattered = [workload for workload in recorded if "@tp" in workload[0].label]
    assert sum(map(len, scattered)) > 20
    shares, _ = rates(scattered, 1.0, TRIALS)
    assert shares[Verdict.FAST] + shares[Verdict.SLOW] <= 0.05
    shares, _ = rates(scattered, 1.05, TRIALS)
    assert shares[Verdict.SLOW] + shares[Verdict.SAME] <= 0.05
