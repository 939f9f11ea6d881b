"""Results and inputs on the CPU of graphs that work on a GPU: where eager has them, with eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import optimizations

pytestmark = pytest.mark.gpu


def written(x: torch.Tensor, s: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
    s.add_(1).div_(3)
    return x * s, v + s


PROGRAMS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[Any, ...]]] = {
    "made there": lambda x, s, v: (x * 2, torch.zeros(3), torch.tensor(0.5), torch.arange(3) / 7),
    "a scalar": lambda x, s, v: (x * 2, s.sin()),
    "a scalar of both": lambda x, s, v: (x * s, s / 3, s),
    "a scalar and a vector": lambda x, s, v: (x * 2, v + s.sin()),
    "scalars": lambda x, s, v: (x * 2, torch.stack([s, s + 1])),
    "added in place": lambda x, s, v: (x + s.sin().to(x.device), v.add_(s.sin())),
    "written": written,
}


STOCK = {"indirection": "off"}
OPTIONS = ({}, {"placement": False}, STOCK, {"stage_limit_bytes": 1})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_where_eager_has_them(name: str, options: dict[str, Any]) -> None:
    program = PROGRAMS[name]
    compiled = torch.compile(program, backend="encore", options=options)
    kept = []
    for step in range(12):
        given = torch.full((4,), 1.5 + step, device="cuda"), torch.tensor(step / 7 + 0.3), torch.arange(3.0) + step
        other = tuple(one.clone() for one in given)
        expected, found = program(*given), compiled(*other)
        if options != STOCK:  # its graphs overwrite what is kept
            kept.append((found, expected))
        for mine, theirs in zip((*found, *other), (*expected, *given), strict=True):
            assert mine.device == theirs.device
            torch.testing.assert_close(mine, theirs)
    for found, expected in kept:
        torch.testing.assert_close(found, expected)
    assert optimizations.report()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_of_scalars_on_the_cpu_are_there(options: dict[str, Any]) -> None:
    """What a forward saves for its backward is on the device that the backward was compiled for."""

    def loss(x: torch.Tensor, s: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (x * s.sin()).sum() * s + (v * s).sum().to(x.device)

    compiled = torch.compile(loss, backend="encore", options=options)
    for step in range(12):
        given = torch.full((4,), 1.5 + step, device="cuda"), torch.tensor(step / 7 + 0.3), torch.arange(3.0) + step
        expected, found = ([one.clone().requires_grad_() for one in given] for _ in range(2))
        loss(*expected).backward()
        compiled(*found).backward()
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert mine.grad.device == theirs.grad.device == theirs.device
            torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_optimizer_that_counts_its_steps_on_the_cpu(options: dict[str, Any]) -> None:
    """It is captured as under stock: what is written into CPU scalars may be computed on the GPU."""

    def trained(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Linear(8, 8, device="cuda")
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        step = torch.compile(optimizer.step, backend="encore", options=options) if compiled else optimizer.step
        for index in range(10):
            net(torch.full((4, 8), 0.1 * index, device="cuda")).square().mean().backward()
            step()
            optimizer.zero_grad()
        steps = [state["step"] for state in optimizer.state.values()]
        assert {one.device.type for one in steps} == {"cpu"}
        return [*net.parameters(), *steps]

    torch.testing.assert_close(trained(True), trained(False))
