"""Parts of tests of graphed callables: a simulated device, batches, gradients, and a module with a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from simulated_gpu.operators import CpuDevice
from torch import nn

from optimizations.capture.callables.graph_callables import GraphedCallables


def graphed(callables: Any, sample: Sequence[Any] | None = None, **options: Any) -> GraphedCallables:
    return GraphedCallables(callables, sample, **{"device": CpuDevice(), **options})


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) > 0 and all(
        one is other if one is None or other is None else torch.equal(one, other)
        for one, other in zip(some, others, strict=True)
    )


def gradients(*modules: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for module in modules for parameter in module.parameters()]


def batches(count: int = 3, *, requires_grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(2, 3, requires_grad=requires_grad) for _ in range(count)]


class Buffered(nn.Module):
    """Counts its calls in a buffer, and returns the product of its arguments or nothing."""

    def __init__(self, *, returns: bool = True) -> None:
        super().__init__()
        self.returns = returns
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor | None:
        self.count.add_(1)
        return x * (2 if y is None else y) if self.returns else None


class Scaled(torch.Tensor):
    """Integers and a scale, as quantized weights are kept."""

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype, device=integers.device)

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor) -> None:
        self.integers, self.scale = integers, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].integers, args[0].scale)
        args = [one.integers * one.scale if isinstance(one, Scaled) else one for one in args]
        return func(*args, **(kwargs or {}))


class Halves(nn.Module):
    """Two results, of which one depends on all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        return hidden, self.second(hidden) * y


class Views(nn.Linear):
    """Returns a result, a view of it, and the result again."""

    def forward(self, x: torch.Tensor) -> Any:
        result = super().forward(x)
        return result, result[0], result


class AddsItself(torch.autograd.Function):
    """A product whose backward adds the weight's gradient to a tensor of the weight's own, as fused ones do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(x.t() @ gradient)
        return gradient @ weight.t(), None


class ReturnsOwnTensors(torch.autograd.Function):
    """Its gradients are its result and its input themselves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = x * weight
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> Any:
        x, result = ctx.saved_tensors
        return result, x


class Skips(nn.Module):
    """Gives its argument back, next to a result or alone."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.linear, self.alone = nn.Linear(3, 3), alone

    def forward(self, x: torch.Tensor) -> Any:
        return x if self.alone else (x, self.linear(x), x.detach())
