"""Small programs with one obstacle each, for the tests of `encore explain`. Every function is a `module:callable`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

Made = tuple[nn.Module, tuple[Any, ...]]

WIDTH = 64


class MaskAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.mask = torch.ones(8, WIDTH).tril()

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + self.mask.to(x.device)).softmax(-1)


def mask_attribute() -> Made:
    return MaskAttribute(), (torch.randn(8, WIDTH),)


class NumpyScalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.temperature = numpy.power(WIDTH, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) / self.temperature


def numpy_scalar() -> Made:
    return NumpyScalar(), (torch.randn(8, WIDTH),)


class StagedArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to("cuda")).relu()


def staged_argument() -> Made:
    return StagedArgument().to("cuda"), (torch.randn(8, WIDTH),)


class CpuOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(WIDTH, dtype=torch.float32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.cos(), self.table.sin()


def cpu_output() -> Made:
    return CpuOutput(), (torch.randn(8, WIDTH),)


class CpuIndex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.tensor([0, 2, 5])

    def forward(self, x: Tensor) -> Tensor:
        return x.cos()[self.rows].sin()


def cpu_index() -> Made:
    return CpuIndex(), (torch.randn(8, WIDTH),)


class MutatedCpuState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * 2


def mutated_cpu_state() -> Made:
    return MutatedCpuState(), (torch.randn(8, WIDTH),)


class ConstructorChain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(WIDTH) * 0.5
        return x + angles.sin().to(x.device)


def constructor_chain() -> Made:
    return ConstructorChain(), (torch.randn(8, WIDTH),)


class LengthsReadByHost(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = self.mask(x, lengths)
        kept = lengths[lengths > 3]
        return (x * mask).cos() * kept.shape[0]

    def mask(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.ones_like(x)
        for row in range(x.shape[0]):
            mask[row, lengths[row] :] = 0
        return mask


def lengths_read_by_host() -> Made:
    return LengthsReadByHost(), (torch.ones(2, WIDTH), torch.tensor([3, 5]))


class WeightReadByHost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:
            y = y.cos()
        return y.sin()


def weight_read_by_host() -> Made:
    return WeightReadByHost(), (torch.randn(8, WIDTH),)


class MutatedInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x.cos()


def mutated_input() -> Made:
    return MutatedInput(), (torch.randn(8, WIDTH),)


def dropout() -> Made:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).train(), (torch.randn(8, WIDTH),)


class Attention(nn.Module):
    def __init__(self, dtype: torch.dtype, *, masked: bool) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(24, 24, dtype=torch.bool).tril() if masked else None)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=self.mask)


def _attention(dtype: torch.dtype, *, masked: bool = False) -> Made:
    return Attention(dtype, masked=masked), (torch.randn(2, 4, 24, 32, dtype=dtype),)


def attention_bf16() -> Made:
    return _attention(torch.bfloat16)


class PermutedMask(nn.Module):
    """A mask whose rows are not contiguous, as T5 makes it of its biases."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.Embedding(8, 4, dtype=torch.bfloat16)
        self.register_buffer("distances", torch.arange(24 * 24).view(24, 24) % 8)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.biases(self.distances).permute(2, 0, 1).unsqueeze(0)
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def attention_bf16_permuted_mask() -> Made:
    return PermutedMask(), (torch.randn(2, 4, 24, 32, dtype=torch.bfloat16),)


def attention_bf16_masked() -> Made:
    return _attention(torch.bfloat16, masked=True)


def attention_fp32() -> Made:
    return _attention(torch.float32)


def attention_fp64() -> Made:
    return _attention(torch.float64)


class DeviceConstant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([0.25] * WIDTH, device=x.device) + torch.full((WIDTH,), 2.0, device=x.device)


def device_constant() -> Made:
    return DeviceConstant(), (torch.randn(8, WIDTH),)


class LayerNorm(nn.Module):
    """So many rows that one kernel of its backward reduces along rows and columns at once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def layer_norm() -> Made:
    return LayerNorm(), (torch.randn(2**17, WIDTH, requires_grad=True),)


@torch.library.custom_op("encore_explain::turned", mutates_args=())
def turned(gradient: Tensor) -> Tensor:
    return -gradient


@turned.register_fake
def _(gradient: Tensor) -> Tensor:
    return torch.empty_like(gradient)


class TurnedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return turned(gradient)  # in the backward


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return TurnedGradient.apply(self.linear(x))


def operator_in_backward() -> Made:
    return Turned(), (torch.randn(8, WIDTH),)


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradient * scale.to(gradient.device), None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = torch.ones(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return ScaledGradient.apply(self.linear(x), self.scale)


def copy_in_backward() -> Made:
    return Scaled(), (torch.randn(8, WIDTH),)


def sparse_gradient() -> Made:
    """The forward can be captured, the backward cannot."""
    return nn.Embedding(16, WIDTH, sparse=True), (torch.tensor([1, 2, 2]),)


class GradientInForward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: y.sin().sum())(x)  # its cosine


def gradient_in_forward() -> Made:
    return GradientInForward(), (torch.randn(8, WIDTH),)


class NoGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.new_zeros(gradient.shape[0] + 1)  # of another shape than x


class Undifferentiable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return NoGradientOf.apply(self.linear(x))


def no_backward() -> Made:
    return Undifferentiable(), (torch.randn(8, WIDTH),)


TRAINED = ("layer_norm", "operator_in_backward", "copy_in_backward", "sparse_gradient", "no_backward")
"""Programs whose backward is of interest."""


class WithExampleInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        y: Tensor = self.linear(x)
        return y if scale is None else y * scale

    def example_inputs(self) -> tuple[Tensor]:
        return (torch.randn(8, WIDTH),)


def with_keywords() -> tuple[nn.Module, list[Tensor], Mapping[str, Tensor]]:
    return WithExampleInputs(), [torch.randn(8, WIDTH)], {"scale": torch.ones(WIDTH)}


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        torch.compiler.disable(_raise)(y)
        return y


def _raise(y: Tensor) -> None:
    raise ArithmeticError("no such number")


class Repeats(torch.nn.Module):
    """A layer that Dynamo leaves in the middle, three times over."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = BreaksInside()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.layer(x)
        return x


class BreaksInside(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos() + x


def repeats() -> Made:
    return Repeats(), (torch.randn(8, WIDTH),)


def raises() -> Made:
    return Raises(), (torch.randn(8, WIDTH),)


def dies() -> Made:
    os.abort()


def hangs() -> Made:
    time.sleep(600)
    return mask_attribute()


def spins() -> Made:
    while True:
        pass


def returns_a_number() -> int:
    return 3


ready_made = nn.Linear(WIDTH, WIDTH)
not_callable = 3
