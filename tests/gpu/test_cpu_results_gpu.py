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


OPTIONS = ({}, {"placement": False}, {"stage_limit_bytes": 1})


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
        kept.append((found, expected))
        for mine, theirs in zip((*found, *other), (*expected, *given), strict=True):
            assert mine.device == theirs.device
            torch.testing.assert_close(mine, theirs)
    for found, expected in kept:
        torch.testing.assert_close(found, expected)
    assert optimizations.report()


def loss(x: torch.Tensor, s: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (x * s.sin()).sum() * s + (v * s).sum().to(x.device)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_of_scalars_on_the_cpu_are_there(options: dict[str, Any]) -> None:
    """What a forward saves for its backward is on the device that the backward was compiled for."""
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
