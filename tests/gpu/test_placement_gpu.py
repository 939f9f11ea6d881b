"""Placement on a GPU: one launch without waiting, and staged arguments that calls in flight still read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_harness import call, encore
from placement_examples import WIDTH, DetectionScalars, MaskedBlocks, TimedDenoiser
from torch import nn

pytestmark = pytest.mark.gpu

WARM_UP = 4
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def _text(seed: int) -> list[torch.Tensor]:
    return [torch.randint(0, 16, (3, 6), generator=torch.Generator().manual_seed(seed)).cuda()]


def _image(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(1, 3, 5, 7, generator=generator).cuda(), 9 * torch.rand(4, 4, generator=generator).cuda()]


def _step(seed: int) -> list[torch.Tensor]:
    # The timestep stays on the CPU, as schedulers keep it.
    return [torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed)).cuda(), torch.tensor(seed % 50)]


EXAMPLES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list[torch.Tensor]]]] = {
    "mask": (MaskedBlocks, _text),
    "scalars": (DetectionScalars, _image),
    "timestep": (TimedDenoiser, _step),
}


def _steady_events(function: Any, *inputs: Any) -> tuple[list[str], list[str]]:
    """Return names of runtime calls and device activities in one fast call."""
    for _ in range(WARM_UP):
        call(function, *inputs)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile, torch.no_grad():
        function(*inputs)
    events = list(profile.events())
    calls = [event.name for event in events if event.name.startswith("cuda")]
    on_device = [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    return calls, on_device


@pytest.mark.alone
@pytest.mark.parametrize(("name", "copies"), [("mask", 0), ("scalars", 0), ("timestep", 1)])
def test_fast_path_is_one_graph_launch_without_synchronization(name: str, copies: int) -> None:
    make, inputs = EXAMPLES[name]
    compiled = encore(make().cuda().eval(), "off")
    calls, on_device = _steady_events(compiled, *inputs(1))
    assert sum(one.startswith("cudaGraphLaunch") for one in calls) == 1
    # The profiler itself waits for the device when it stops, after the last launch or copy.
    last = max(i for i, one in enumerate(calls) if "Launch" in one or "Memcpy" in one)
    assert not [one for one in calls[:last] if one in WAITS]
    to_device = [activity for activity in on_device if "HtoD" in activity]
    assert len(to_device) == copies
    assert all("Pinned" in activity for activity in to_device)


@pytest.mark.alone
def test_arguments_of_calls_in_flight_are_not_overwritten() -> None:
    """The host runs ahead by many calls, each with another timestep, while the device is busy."""

    def program(x: torch.Tensor, t: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x * t.to(x.device) + ids.to(x.device).sum()

    compiled = encore(program, "off")
    x = torch.ones(64, device="cuda")
    work = torch.randn(4096, 4096, device="cuda")
    for seed in range(WARM_UP):
        call(compiled, x, torch.full((64,), float(seed)), torch.tensor([seed]))
    torch.cuda.synchronize()
    for _ in range(50):
        work = torch.tanh(work @ work)
    found = []
    for seed in range(64):
        t, ids = torch.full((64,), float(seed)), torch.tensor([seed])
        found.append(call(compiled, x, t, ids)[0])
        t.fill_(-1.0)  # the caller may use its tensors again at once
        ids.fill_(-1)
    torch.cuda.synchronize()
    assert [value[0].item() for value in found] == [2.0 * seed for seed in range(64)]
