"""A captured step on a GPU reads batches in place whose addresses change on every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_parts import unaudited
from torch import nn

from tests.gpu.test_first_runs_gpu import doubled

pytestmark = pytest.mark.gpu
ROWS, COLUMNS, CLASSES = 64, 32, 8

Change = Callable[[torch.Tensor], torch.Tensor]


def training(change: Change, *, compiled: bool = True) -> Callable[..., Any]:
    torch.manual_seed(7)
    weight = nn.Parameter(torch.randn(COLUMNS, CLASSES, device="cuda") / 8)
    optimizer = torch.optim.AdamW([weight], lr=0.01, fused=True, capturable=True)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(x.sin() @ weight, y)

    forward = torch.compile(loss_of) if compiled else loss_of

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward(change(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def calls() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """All are live at once, so that no two share an address; the eighth is unaligned."""
    generator = torch.Generator().manual_seed(11)
    found = []
    for index in range(12):
        x = torch.randn(ROWS, COLUMNS, generator=generator).cuda()
        if index == 7:
            x = torch.empty(x.numel() + 1, device="cuda")[1:].view_as(x).copy_(x)
        found.append((x, torch.randint(CLASSES, (ROWS,), generator=generator).cuda()))
    assert len({x.data_ptr() for x, _ in found}) == len(found)
    return found


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    ("change", "compiled", "in_place"),
    [(as_it_is, True, True), (doubled, True, False), (as_it_is, False, False)],
    ids=["kernels of Inductor", "a kernel of its own", "operators"],
)
def test_moved_batches_of_known_kernels_are_read_in_place(change: Change, compiled: bool, in_place: bool) -> None:
    eager = training(change, compiled=compiled)
    expected = [eager(*one) for one in calls()]
    torch.compiler.reset()
    step = unaudited(training(change, compiled=compiled))
    found = [step(*one) for one in calls()]
    report = step.report()
    assert report.refusals == ()
    assert all(map(torch.equal, found, expected)), (found, expected)
    (recording,) = report.recordings
    assert (recording.tensors_followed > 0) is in_place, recording
    assert recording.tensors_followed + recording.copied_tensors == 2
    assert recording.replays >= 12 - 5
    step.close()


def test_batch_read_in_place_takes_no_memory() -> None:
    step = unaudited(training(as_it_is))
    large = [torch.randn(2**19, COLUMNS, device="cuda") for _ in range(7)]
    labels = torch.randint(CLASSES, (2**19,), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for x in large:
        step(x, labels)
    (recording,) = step.report().recordings
    assert recording.tensors_followed == 1
    kept = torch.cuda.memory_allocated() - before - recording.pool_bytes
    assert kept < large[0].nbytes, (kept, recording)
    step.close()
