"""Trial calls of a program that is far ahead of its device: outcomes are known many calls later."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from simulated_gpu.driver import floats
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import COUNT, Compiled, Model, nodes, values

import optimizations
from optimizations.in_place import proof, trials
from optimizations.in_place.budget import MOST_REPLAYS

AHEAD = 300
"""Launches between the host and its device."""


class Device:
    """The device is through with a trial `AHEAD` calls later, as its event tells. Counts what was under way."""

    def __init__(self) -> None:
        self.calls = 0
        self.under_way = 0
        self.most = 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    found = Device()

    class Late(proof.Pending):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.at = found.calls
            found.under_way += 1
            found.most = max(found.most, found.under_way)

        def take(self) -> list[float] | None:
            if found.calls < self.at + AHEAD:
                return None
            found.under_way -= 1
            return super().take()

    monkeypatch.setattr(proof, "Pending", Late)
    yield found


def calls_until_settled(compiled: Compiled, device: Device, arguments: Any) -> int:
    kept = []
    for step in range(2000):
        device.calls += 1
        kept.append(arguments(step))
        del kept[:-4]
        compiled(*kept[-1])
        if step > 8 and optimizations.settled():
            return step
    raise AssertionError([node.waiting for node in nodes()])


def test_constant_inputs_settle_when_the_last_outcome_is_there(cuda_on_cpu: CudaOnCpu, device: Device) -> None:
    compiled, inputs = Compiled(Model(cuda_on_cpu)), (values(1), values(2), values(7))
    calls = calls_until_settled(compiled, device, lambda step: inputs)
    assert calls <= AHEAD + MOST_REPLAYS
    assert device.most == trials.MOST_UNDER_WAY
    (report,) = compiled.reports
    assert report.proof_runs == trials.MOST_UNDER_WAY, "no trial begins later, and nothing waits for the device"
    assert not any(one.indirect for one in report.inputs)


def test_hidden_pointer_is_found_with_outcomes_under_way(cuda_on_cpu: CudaOnCpu, device: Device) -> None:
    """The candidate's wrong results reach no caller, and x, which is proven apart, is read in place."""
    compiled, w = Compiled(Model(cuda_on_cpu, hides_y=True)), values(7)
    kept = []
    for step in range(3 * AHEAD):
        device.calls += 1
        x, y = values(step), values(-3 * step)
        kept.append((x, y))
        del kept[:-4]
        assert torch.equal(compiled(x, y, w)[0], 2 * x + y * w), step
    (report,) = compiled.reports
    assert not report.inputs[1].indirect
    assert optimizations.settled()


@pytest.mark.parametrize("ahead", [2, AHEAD])
def test_unrepeatable_function_is_proven_by_calls_that_know_it(
    cuda_on_cpu: CudaOnCpu, device: Device, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those under way when the first outcome showed it had no second run to compare with, and count for nothing. If
    they were the last, inputs stay copied."""
    monkeypatch.setattr(sys.modules[__name__], "AHEAD", ahead)
    draw = random.Random(5)

    class Drawn(Model):
        def _body(self, x: bytes, y: bytes, w: bytes, out: bytes) -> None:
            super()._body(x, y, w, out)
            at = floats(int.from_bytes(out, "little"), COUNT)
            at[:] = [value + draw.uniform(0, 1e-3) for value in list(at)]

    compiled, w = Compiled(Drawn(cuda_on_cpu)), values(7)
    calls = calls_until_settled(compiled, device, lambda step: (values(step), values(-3 * step), w))
    (report,) = compiled.reports
    assert [one.indirect for one in report.inputs if one.name in "xy"] == [ahead == 2] * 2, report
    assert calls <= ahead + MOST_REPLAYS


def test_what_a_trial_waits_for_says_how_far_it_is(cuda_on_cpu: CudaOnCpu, device: Device) -> None:
    compiled, inputs = Compiled(Model(cuda_on_cpu)), (values(1), values(2), values(7))
    for _ in range(60):
        device.calls += 1
        compiled(*inputs)
    (node,) = nodes()
    assert node.waiting is not None
    assert node.waiting.endswith("8 trial calls so far, 8 of them under way")


def test_a_proof_that_has_no_inputs_to_try_yet_is_waited_for(cuda_on_cpu: CudaOnCpu, device: Device) -> None:
    """The first trial needs data of an earlier call, and others need addresses that can be read in place."""
    compiled, w = Compiled(Model(cuda_on_cpu)), values(7)
    for step in range(12):
        device.calls += 1
        x = values(step) if step < 4 else values(step, offset=1)
        compiled(x, values(2), w)
        if step >= 2:
            (node,) = nodes()
            assert node.session.pending and node.waiting, step
