"""A training step that fetches its own batches is one CUDA graph and trains as in eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import encore

pytestmark = pytest.mark.gpu

EPOCHS, BATCH = 3, 32


def trained(*, is_graphed: bool, micro_batches: int, rows: int) -> tuple[list[list[float]], Any]:
    """Return the losses of all steps, and the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
    data = TensorDataset(torch.randn(rows, 16), torch.randint(4, (rows,)))
    loader = DataLoader(data, batch_size=BATCH, pin_memory=True)
    batches: Any = None

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        losses = []
        for _ in range(micro_batches):
            inputs, labels = next(batches)
            loss = nn.functional.cross_entropy(model(inputs.cuda()), labels.cuda())
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses)

    run: Any = encore.graph_step(step) if is_graphed else step
    if is_graphed:
        batches = encore.static_loader(loader)
    found = []
    for _ in range(EPOCHS):
        batches = iter(batches if is_graphed else loader)
        found += [one.tolist() for one in epoch(run)]
    return found, run


def epoch(step: Any) -> Iterator[torch.Tensor]:
    while True:
        try:
            losses = step()
        except StopIteration:
            return
        yield losses


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("rows", [BATCH * 12, BATCH * 12 - 8])
def test_step_that_fetches_batches_trains_as_eager(micro_batches: int, rows: int) -> None:
    expected, _ = trained(is_graphed=False, micro_batches=micro_batches, rows=rows)
    found, step = trained(is_graphed=True, micro_batches=micro_batches, rows=rows)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    assert step.report().replays > len(found) // 3, step.report()
    assert not step.report().refusals, step.report()


def test_buffers_are_fixed_and_filled_in_stream_order() -> None:
    source = [torch.full((2**22,), float(index)) for index in range(20)]
    loader = encore.static_loader(source)
    addresses, sums = set(), []
    for batch in loader:
        addresses.add(batch.data_ptr())
        torch.cuda._sleep(1_000_000)  # the copy of the next batch must not overtake what reads this one
        sums.append(batch.double().sum())
    assert len(addresses) == 1 and batch.is_cuda
    assert [one.item() for one in sums] == [float(index) * 2**22 for index in range(20)]
