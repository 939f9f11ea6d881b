"""Changes between ratios of two runs: on log ratios whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from suite.report.two_runs.change import change_between, mean_change, own_variance
from suite.results.stats import UNKNOWN, Spread


def test_interval_is_that_of_two_samples_of_students_t() -> None:
    """By hand: variance 0.0002 with three degrees of freedom, of two processes and of three; t is 3.182."""
    base, new = np.array([0.01, -0.01]), np.array([0.01, 0.0, -0.01])
    assert own_variance(base, new) == (pytest.approx(0.0004 / 3), 3)
    change = change_between(base, new, UNKNOWN)
    assert change is not None
    assert math.log(change.high) == pytest.approx(3.182 * math.sqrt(0.0004 / 3 * (1 / 2 + 1 / 3)), rel=1e-3)
    assert change.low == pytest.approx(1 / change.high)


def test_variance_is_pooled_and_never_made_smaller() -> None:
    base, new = np.array([0.01, -0.01]), np.array([0.0])
    narrow, wide = (change_between(base, new, Spread(variance, 9.0)) for variance in (1e-6, 1e-2))
    assert narrow is not None and wide is not None
    assert narrow.error == pytest.approx(math.sqrt(0.0002 * 1.5)) and narrow.freedom == wide.freedom == 10
    assert wide.error == pytest.approx(math.sqrt((0.0002 + 9 * 1e-2) / 10 * 1.5))


def test_single_processes_tell_an_interval_only_by_others() -> None:
    one = np.array([0.0])
    assert change_between(one, one, UNKNOWN) is None
    assert change_between(one, one, Spread(1e-4, 5.0)) is not None


def test_intervals_cover_a_known_change() -> None:
    generator = np.random.default_rng(1)
    changes = [
        change_between(generator.normal(0.0, 0.02, 3), generator.normal(0.1, 0.02, 4), UNKNOWN) for _ in range(400)
    ]
    covered = sum(change is not None and change.low <= math.exp(0.1) <= change.high for change in changes)
    assert 0.92 <= covered / len(changes) <= 0.98


def test_mean_change_is_geometric_and_better_known() -> None:
    generator = np.random.default_rng(2)
    changes = [
        change_between(generator.normal(0.0, 0.02, 3), generator.normal(truth, 0.02, 3), UNKNOWN)
        for truth in (0.05, 0.1, 0.15, 0.2)
    ]
    found = [change for change in changes if change is not None]
    mean = mean_change(found)
    assert mean.value == pytest.approx(math.exp(np.mean([math.log(change.value) for change in found])))
    assert mean.count == 4 and mean.half_width < min(change.half_width for change in found)
    assert mean.low < math.exp(0.125) < mean.high
    with pytest.raises(ValueError, match="at least one"):
        mean_change([])
