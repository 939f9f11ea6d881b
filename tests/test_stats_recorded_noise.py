"""Verdicts on noise as it was recorded on an H200: wrong ones, missed ones, and none. See `noise_simulation`."""

from __future__ import annotations

import numpy as np
import pytest
from noise_simulation import Noise, rates, recorded_noise

from suite.stats import Verdict

TRIALS = 20


@pytest.fixture(scope="module")
def cells() -> list[list[Noise]]:
    found = recorded_noise()
    cells = [noise for workload in found for noise in workload]
    assert len(cells) > 60
    slowed = [np.ptp(np.log(np.median(noise.samples_us, axis=1))) > np.log(1.3) for noise in cells]
    assert sum(slowed) > 15, "hosts whose regimes swallow whole blocks are among them"
    return found


def test_a_mode_is_not_found_to_differ_from_itself_and_is_mostly_found_the_same(cells: list[list[Noise]]) -> None:
    shares, _ = rates(cells, 1.0, TRIALS)
    assert shares[Verdict.FAST] + shares[Verdict.SLOW] <= 0.05
    assert shares[Verdict.AMBG] <= 0.10


def test_a_true_five_percent_is_found(cells: list[list[Noise]]) -> None:
    shares, _ = rates(cells, 1.05, TRIALS)
    assert shares[Verdict.FAST] >= 0.90
    assert shares[Verdict.SLOW] + shares[Verdict.SAME] <= 0.05
    assert shares[Verdict.AMBG] <= 0.10
