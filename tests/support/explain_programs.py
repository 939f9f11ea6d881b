"""Small programs with one obstacle each, for the tests of `encore explain`. Every function is a `module:callable`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

Made = tuple[nn.Module, tuple[Any, ...]]

WIDTH = 64


class WithLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class MaskAttribute(WithLayer):
    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(8, WIDTH).tril()

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + self.mask.to(x.device)).softmax(-1)


class CpuAutocast(WithLayer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            weights = torch.arange(float(WIDTH)).relu()
        return self.linear(x) * weights.to(x.device)


class NumpyScalar(WithLayer):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = numpy.power(WIDTH, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) / self.temperature


class StagedArgument(WithLayer):
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


class CpuIndex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.tensor([0, 2, 5])

    def forward(self, x: Tensor) -> Tensor:
        return x.cos()[self.rows].sin()


class MutatedCpuState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * 2


class ConstructorChain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(WIDTH) * 0.5
        return x + angles.sin().to(x.device)


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


class WeightReadByHost(WithLayer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:
            y = y.cos()
        return y.sin()


class MutatedInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x.cos()


class Attention(nn.Module):
    def __init__(self, dtype: torch.dtype, *, masked: bool) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(24, 24, dtype=torch.bool).tril() if masked else None)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=self.mask)


def _attention(dtype: torch.dtype, *, masked: bool = False) -> Made:
    return Attention(dtype, masked=masked), (torch.randn(2, 4, 24, 32, dtype=dtype),)


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


class GradientInForward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: y.sin().sum())(x)  # its cosine


class WithExampleInputs(WithLayer):
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


class Towers(nn.Module):
    """Two towers that do not depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x).softmax(-1)
        right = self.right(x).tanh().sum(-1)
        return left * right[:, None]


def of(make: Callable[[], nn.Module]) -> Callable[[], Made]:
    """Return the program that calls a module on 8 rows."""
    return lambda: (make(), (torch.randn(8, WIDTH),))


mask_attribute = of(MaskAttribute)
cpu_autocast = of(CpuAutocast)
numpy_scalar = of(NumpyScalar)
cpu_output = of(CpuOutput)
cpu_index = of(CpuIndex)
mutated_cpu_state = of(MutatedCpuState)
constructor_chain = of(ConstructorChain)
weight_read_by_host = of(WeightReadByHost)
mutated_input = of(MutatedInput)
gradient_in_forward = of(GradientInForward)
repeats = of(Repeats)
raises = of(Raises)
towers = of(Towers)
attention_bf16 = functools.partial(_attention, torch.bfloat16)
attention_bf16_masked = functools.partial(_attention, torch.bfloat16, masked=True)
attention_fp32 = functools.partial(_attention, torch.float32)
attention_fp64 = functools.partial(_attention, torch.float64)


def dies() -> Made:
    os.abort()


def spins() -> Made:
    while True:
        pass


def returns_a_number() -> int:
    return 3


ready_made = nn.Linear(WIDTH, WIDTH)
not_callable = 3
