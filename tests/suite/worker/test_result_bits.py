"""Bits of a cell's results are compared between calls and with the mode's first process."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny_cells import Mlp, cell, replaced_call

import suite.worker.judge
from suite.measure.fingerprint import SKETCH
from suite.worker.protocol import Inaccurate

__all__ = ["cell"]


def test_digests_repeat_for_equal_seeds_only(cell):
    first, again, other = (
        cell(lambda: Mlp(0.5), task="training", stochastic=True, spec={"seed": seed}).prepare().correctness.digests
        for seed in (7, 7, 8)
    )
    assert first == again
    assert first != other


def test_results_that_change_between_calls_are_nondeterministic(cell, monkeypatch):
    calls = itertools.count(1)
    replaced_call(monkeypatch, lambda module, x: module(x) * (1 + 1e-6 * next(calls)))
    correctness = cell(Mlp).prepare().correctness
    assert correctness.passed and not correctness.deterministic


class Varying(Mlp):
    """Its output is the same in each call, but for what the seed decides, and a buffer is not."""

    size = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.noise += (1 + 1e-6 * next(self.counted)) * self.size * torch.linspace(1, 2, 64)
        return super().forward(x)

    counted = itertools.count()


def test_varying_tensor_of_a_later_process_counts_by_value(cell, monkeypatch):
    first = cell(Varying).prepare().correctness
    assert first.passed and not first.deterministic
    assert [list(one) for one in first.varying] == [["buffer noise"]] * 2
    spec = {"known_digests": first.digests, "known_varying": first.varying}
    assert cell(Varying, spec=spec).prepare().correctness is None
    for size in (0.0, -1.0, 1.1):
        monkeypatch.setattr(Varying, "size", size)
        assert cell(Varying, spec=spec).prepare().correctness is not None, "compared like the first"


def test_tensor_varying_on_one_input_set_varies_on_all(cell):
    """Two calls may have equal bits accidentally, and a later process would be compared again."""
    first_set: list[torch.Tensor] = []

    class VaryingOnOthers(Varying):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first_set.append(x.clone())
            self.noise += 1 if torch.equal(x, first_set[0]) else 1 + 1e-6 * next(self.counted)
            return Mlp.forward(self, x)

    first = cell(VaryingOnOthers).prepare().correctness
    assert first.passed and not first.deterministic
    assert [list(one) for one in first.varying] == [["buffer noise"]] * 2
    assert all(len(one["buffer noise"]) == SKETCH for one in first.varying)


def test_later_process_is_compared_only_with_other_bits(cell, monkeypatch):
    spec = {"known_digests": cell(Mlp).prepare().correctness.digests}
    with monkeypatch.context() as patched:
        patched.setattr(suite.worker.judge, "compare_with_eager", lambda *arguments: pytest.fail("compared"))
        assert cell(Mlp, spec=spec).prepare().correctness is None
    replaced_call(monkeypatch, lambda module, x: module(x) * (1 + 1e-6))
    correctness = cell(Mlp, spec=spec).prepare().correctness
    assert correctness is not None and correctness.passed and correctness.digests != spec["known_digests"]
    replaced_call(monkeypatch, lambda module, x: module(x) * 1.01)
    with pytest.raises(Inaccurate):
        cell(Mlp, spec=spec).prepare()
