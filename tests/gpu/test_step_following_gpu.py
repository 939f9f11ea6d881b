"""Inputs that a captured step reads where they lie, on a GPU: batches whose addresses differ from call to call."""

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
    """All alive at once, so that no two lie at the same address; the eighth is not aligned."""
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
def test_moving_batches_of_named_kernels_are_read_in_place(change: Change, compiled: bool, in_place: bool) -> None:
    torch.compiler.reset()
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


def test_overwritten_batch_is_read_as_it_is_then() -> None:
    torch.compiler.reset()
    eager = training(as_it_is)
    expected = [eager(*one) for one in calls()]
    torch.compiler.reset()
    step = unaudited(training(as_it_is))
    first, second = calls()[0], calls()[1]
    found = []
    for index, (x, y) in enumerate(calls()):
        held = first if index % 2 else second
        held[0].copy_(x)
        held[1].copy_(y)
        found.append(step(*held))
    assert step.report().replays >= 12 - 5
    assert all(map(torch.equal, found, expected)), (found, expected)


@pytest.mark.parametrize("others", [False, True], ids=["rows", "rows and others in turn"])
def test_rows_of_a_data_set_are_batches_like_others(others: bool) -> None:
    """Compiled code detaches what it saves of its arguments if that is a view. A placeholder is none."""
    given = calls()
    rows = list(torch.stack([x for x, _ in given]))
    batches = [
        (x if others and index % 2 else row, y) for index, (row, (x, y)) in enumerate(zip(rows, given, strict=True))
    ]
    torch.compiler.reset()
    eager = training(as_it_is)
    expected = [eager(*one) for one in batches]
    torch.compiler.reset()
    step = unaudited(training(as_it_is))
    found = [step(*one) for one in batches]
    report = step.report()
    assert report.refusals == ()
    assert all(map(torch.equal, found, expected)), (found, expected)
    (recording,) = report.recordings
    assert recording.replays >= 12 - 5
    step.close()


def of_many_tensors(device: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A step whose results tell each bit of its batch, and how often it was made."""
    count = torch.zeros(4, device=device)

    def step(*batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count.add_(1)
        bits = torch.cat([one.view(torch.int16).flatten() for one in batch[:3]])
        numbers = torch.cat([one.flatten() for one in batch[3:]])
        return bits + 1, numbers * 3, count * 2

    return step


SIGNALLING = 0x7F81
"""A NaN of bfloat16 that becomes another one where it is computed with."""


def many_small(index: int, device: str) -> list[torch.Tensor]:
    """Three tensors of any bits, NaNs among them, and three of numbers. In some calls none is aligned to more than its
    elements are."""
    generator = torch.Generator().manual_seed(index)
    found = []
    for place, kind in enumerate([torch.bfloat16] * 3 + [torch.int64] * 3):
        shape = (3 + place, 5) if place != 4 else ()
        bits = torch.randint(-(2**15), 2**15, shape, generator=generator)
        bits.view(-1)[0] = SIGNALLING
        whole = bits.to(torch.int16).view(kind) if kind is torch.bfloat16 else bits
        where = torch.zeros(whole.numel() + 1, dtype=kind, device=device)
        found.append((where[1:] if index % 4 == 3 else where[:-1]).view(shape).copy_(whole))
    return found


def test_batch_of_small_tensors_is_copied() -> None:
    batches = [many_small(index, "cuda") for index in range(16)]
    assert all(len({one.data_ptr() for one in places}) == 16 for places in zip(*batches, strict=True))
    eager, step = of_many_tensors("cuda"), unaudited(of_many_tensors("cuda"))
    for batch in batches:
        for found, expected in zip(step(*batch), eager(*batch), strict=True):
            assert torch.equal(found, expected)
    report = step.report()
    assert report.refusals == () and report.dropped_recordings == 0
    (recording,) = report.recordings
    assert (recording.copied_tensors, recording.tensors_followed) == (6, 0), recording
    assert recording.copied_bytes == sum(one.nbytes for one in batches[0])
    assert recording.replays >= 16 - 5 and recording.pointer_bytes == 0
    step.close()


def test_batch_read_in_place_takes_no_memory() -> None:
    torch.compiler.reset()
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
