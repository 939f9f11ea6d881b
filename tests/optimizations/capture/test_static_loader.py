"""Batches of a static loader have fixed addresses, and a step that fetches its own batches is replayed."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from torch import nn

from optimizations import static_loader
from optimizations.capture.static_loader import StaticLoader, Transfer
from optimizations.capture.step.graphed_step import GraphedStep


class OnHost(Transfer):
    """Copies batches in host memory, and counts what was staged."""

    def __init__(self, device: CpuDevice | None = None) -> None:
        self.device = device
        self.staged = 0

    def stage(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.staged += 1
        return [one.clone() for one in tensors]

    def fill(self, buffers: Sequence[torch.Tensor], staged: Sequence[torch.Tensor]) -> None:
        for buffer, one in zip(buffers, staged, strict=True):
            buffer.copy_(one)

    def is_capturing(self) -> bool:
        return self.device is not None and self.device.is_capturing()


def numbered(count: int, rows: Callable[[int], int] = lambda index: 2) -> list[dict[str, Any]]:
    return [{"x": torch.full((rows(index), 3), index + 1.0), "name": "a"} for index in range(count)]


def test_batches_share_buffers_and_have_the_loaders_values() -> None:
    loader = StaticLoader(numbered(4), OnHost())
    found = [(batch["x"].data_ptr(), batch["x"].mean().item(), batch["name"]) for batch in loader]
    assert [value for _, value, _ in found] == [1.0, 2.0, 3.0, 4.0]
    assert len({address for address, _, _ in found}) == 1
    assert len(loader) == 4 and all(name == "a" for _, _, name in found)


def test_batch_of_another_shape_has_its_own_buffers() -> None:
    found = [batch["x"] for batch in StaticLoader(numbered(3, lambda index: 2 - index // 2), OnHost())]
    assert found[0] is found[1] and found[2].shape == (1, 3)
    assert found[0].mean() == 2.0 and found[2].mean() == 3.0


def test_equal_but_distinct_values_have_own_buffers() -> None:
    kind = enum.Enum("Kind", ["A", "B"])
    values = (0.0, -0.0, 1, True, kind.A, kind.B, kind.A, 0.0)
    found = [tensor for tensor, _ in StaticLoader([(torch.ones(1), value) for value in values], OnHost())]
    assert len({id(one) for one in found}) == 6 and found[0] is found[7] and found[4] is found[6]


def test_next_batch_is_staged_ahead_across_epochs() -> None:
    transfer = OnHost()
    loader = StaticLoader(numbered(3), transfer)
    assert next(loader)["x"].mean() == 1.0 and transfer.staged == 2
    assert [batch["x"].mean().item() for batch in loader] == [1.0, 2.0, 3.0]
    with pytest.raises(StopIteration):
        next(loader)


def test_loader_error_is_raised_once_at_its_position() -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield torch.ones(1)
        raise ValueError("no file")

    loader = StaticLoader(broken(), OnHost())
    assert next(loader) == 1.0
    with pytest.raises(ValueError, match="no file"):
        next(loader)
    with pytest.raises(StopIteration):
        next(loader)


@pytest.mark.parametrize(
    ("loader", "device", "error"),
    [(3, None, "needs an iterable of batches"), ([], "cpu", "to a CUDA device, not to cpu")],
)
def test_wrong_use_is_refused(loader: Any, device: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        static_loader(loader, device)


def test_object_in_a_batch_is_refused() -> None:
    with pytest.raises(TypeError, match="a batch of a static loader holds a bytearray; yield tensors"):
        next(StaticLoader([{"x": torch.ones(1), "raw": bytearray(b"a")}], OnHost()))


class Training:
    """Trains with batches that the step fetches itself: with graphs, or as it is."""

    def __init__(
        self, batches: Iterable[Any], device: CpuDevice | None, micro_batches: int = 1, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loader: Any = StaticLoader(batches, OnHost(device)) if device is not None else iter(batches)
        self.micro_batches = micro_batches
        self.step: Any = GraphedStep(self.run, device=device) if device is not None else self.run

    def run(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        losses = []
        for _ in range(self.micro_batches):
            batch = next(self.loader)
            loss = self.model(batch["x"]).square().mean()
            loss.backward()
            losses.append(loss.detach())
        self.optimizer.step()
        return torch.stack(losses)

    def losses(self) -> list[list[float]]:
        found = []
        try:
            while True:
                found.append(self.step().tolist())
        except StopIteration:
            return found


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_step_that_fetches_its_batches_is_replayed(micro_batches: int) -> None:
    batches = numbered(40)
    expected = Training(batches, None, micro_batches).losses()
    training = Training(batches, CpuDevice(), micro_batches)
    assert training.losses() == expected
    assert training.step.report().replays >= len(expected) - 6, training.step.report()


def test_smaller_last_batch_runs_and_epochs_continue() -> None:
    batches = numbered(12, lambda index: 1 if index == 11 else 2)
    eager, training = Training(batches, None), Training(batches, CpuDevice())
    for _ in range(4):
        eager.loader = iter(batches)
        iter(training.loader)
        assert training.losses() == eager.losses()
    assert training.step.report().replays > 30 and not training.step.report().refusals


def test_unused_batches_are_left_for_the_next_call() -> None:
    class Choosing(Training):
        wants = (1, 1, 1, 1, 1, 1, 2, 1, 3, 3, 3, 3, 3, 3, 1, 1, 1)

        def losses(self) -> list[list[float]]:
            found = []
            for wanted in self.wants:
                self.micro_batches = wanted
                found.append(self.step().tolist())
            return found

    batches = numbered(40)
    assert Choosing(batches, CpuDevice()).losses() == Choosing(batches, None).losses()


def test_next_in_a_capture_of_another_kind_is_refused() -> None:
    class Capturing(OnHost):
        def is_capturing(self) -> bool:
            return True

    with pytest.raises(RuntimeError, match="a graph fetches no batches"):
        next(StaticLoader(numbered(2), Capturing()))
