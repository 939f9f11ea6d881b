"""The steady-state cost of feeds, measured where the test runs."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

import torch

from suite.micro.feeds import MASK_BYTES, _attributes, _times, measure_steady_feeds

ROUNDS, CALLS = 15, 2000


def compared_by_pytorch_us() -> float:
    """The median time that `torch.equal` takes for four scalars and the mask: the yardstick of this machine."""
    pairs: Any = tuple((attribute, attribute.clone()) for attribute in _attributes(4, 1, MASK_BYTES))

    def compare(pairs: Any) -> None:
        for one, other in pairs:
            torch.equal(one, other)

    feeds: Any = SimpleNamespace(bind=compare)
    return statistics.median(_times(pairs, feeds, ROUNDS, CALLS))


def test_idle_feeds_cost_less_than_comparing_with_pytorch() -> None:
    """Both are measured on the same machine, so a slow one passes too: it has been 0.4 to 0.75 of the yardstick."""
    before = compared_by_pytorch_us()
    cost = measure_steady_feeds(scalars=4, tensors=1, kept=40, rounds=ROUNDS, calls=CALLS)
    assert 0 < cost.bare_us < cost.host_us
    assert cost.fastest_us <= cost.host_us <= cost.slowest_us
    assert cost.fastest_us < max(before, compared_by_pytorch_us())
