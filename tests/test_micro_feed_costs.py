"""The steady-state cost of feeds, measured where the test runs."""

from __future__ import annotations

from suite.micro.feed_costs import measure_steady_feeds

BUDGET_US = 5.0


def test_feeds_with_nothing_to_refresh_stay_within_their_budget() -> None:
    """A third of the attributes of the largest published case, so that a slow machine passes too."""
    cost = measure_steady_feeds(scalars=4, tensors=1, kept=40)
    assert 0 < cost.bare_us < cost.host_us
    assert cost.fastest_us <= cost.host_us <= cost.slowest_us
    assert cost.fastest_us < BUDGET_US
