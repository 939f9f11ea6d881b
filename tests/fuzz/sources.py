"""The inputs of random programs, and how programs write them from outside between calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy
import torch

from optimizations.graph.memory import size_bytes


@dataclass(frozen=True)
class Input:
    """One input. `layout` is how it lies in its memory; `kind` where the program has it from.

    "argument" is new in each call; "attribute" stays, and is written from outside; "numpy" is an attribute that
    arrives as a new tensor in each call. `landing`: pinned, with a copy into it in flight when a call begins; programs
    only transfer it. `wild`: indices that may be out of range; programs only look up CPU tables with it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_gpu: bool = False
    kind: str = "argument"
    layout: str = "dense"
    landing: bool = False
    wild: bool = False
    later_in: str | None = None


INPUTS = (
    Input("x", (4, 3), torch.float32, on_gpu=True),
    Input("h", (3,), torch.bfloat16, on_gpu=True),
    Input("k", (4,), torch.int64, on_gpu=True),
    Input("step", (), torch.int64),
    Input("time", (3,), torch.float32),
    Input("index", (2,), torch.int64),
    Input("gapped", (4, 3), torch.float32, layout="gapped"),
    Input("again", (3,), torch.float32, later_in="time"),
    Input("nothing", (0, 3), torch.float32),
    Input("pairs", (3, 3), torch.int64),
    Input("wild", (2,), torch.int64, wild=True),
    Input("arriving", (3,), torch.float32, landing=True),
    Input("scale", (), torch.float64, kind="numpy"),
    Input("table", (3,), torch.float64, kind="numpy"),
    Input("mask", (4, 3), torch.float32, kind="attribute"),
    Input("weights", (3,), torch.bfloat16, kind="attribute"),
    Input("gate", (), torch.float32, kind="attribute"),
    Input("flags", (4,), torch.bool, kind="attribute"),
    Input("holes", (4, 3), torch.float32, kind="attribute", layout="gapped"),
    Input("wide", (4, 3), torch.float32, kind="attribute", layout="expanded"),
    Input("turned", (4, 3), torch.float32, kind="attribute", layout="transposed"),
    Input("counts", (3, 3), torch.int64, kind="attribute"),
    Input("landed", (3,), torch.float32, kind="attribute", landing=True),
    Input("minus", (4, 3), torch.float32, on_gpu=True, layout="negative"),
    Input("negated", (3,), torch.float32, kind="attribute", layout="negative"),
    Input("window", (3,), torch.float32, kind="attribute", layout="window"),
)

_MEMORY = {
    # shape of the memory for a shape, and the view of it
    "dense": (lambda shape: shape, lambda memory, shape: memory),
    "gapped": (lambda shape: (shape[0], 2 * shape[1]), lambda memory, shape: memory[:, ::2]),
    "expanded": (lambda shape: (1, shape[1]), lambda memory, shape: memory.expand(shape)),
    "transposed": (lambda shape: shape[::-1], lambda memory, shape: memory.t()),
    # the middle of a longer tensor
    "window": (lambda shape: (3 * shape[0],), lambda memory, shape: memory[shape[0] : 2 * shape[0]]),
    # the imaginary part of a lazy conjugate, which is lazily negative: the memory holds real and imaginary parts
    "negative": (lambda shape: (*shape, 2), lambda memory, shape: torch.view_as_complex(memory).conj().imag),
}


def memory_and_view(entry: Input, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory with random values, and the tensor in it that `entry` describes."""
    shape_of, _ = _MEMORY[entry.layout]
    memory = random_values(shape_of(entry.shape), entry.dtype, generator, wild=entry.wild)
    return memory, view_of(entry, memory)


def view_of(entry: Input, memory: torch.Tensor) -> torch.Tensor:
    """The tensor that `entry` describes in this memory, on whichever device."""
    return _MEMORY[entry.layout][1](memory, entry.shape)


def random_values(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, *, wild: bool = False
) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype is torch.int64:
        return torch.randint(0, 4 if wild else 3, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


def _bits(tensor: torch.Tensor) -> numpy.ndarray:
    return tensor.detach().view(torch.uint8 if tensor.dtype is torch.bool else _INTEGERS[tensor.element_size()]).numpy()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _by_numpy(memory: torch.Tensor, new: torch.Tensor) -> None:
    _bits(memory)[...] = _bits(new)


def _by_data(memory: torch.Tensor, new: torch.Tensor) -> None:
    memory.data.copy_(new)


def _by_apply(memory: torch.Tensor, new: torch.Tensor) -> None:
    values = iter(new.flatten().tolist())
    memory.apply_(lambda _: next(values))


def _by_map(memory: torch.Tensor, new: torch.Tensor) -> None:
    memory.map_(new, lambda _, value: value)  # type: ignore[attr-defined]


def _by_storage(memory: torch.Tensor, new: torch.Tensor) -> None:
    memory.untyped_storage().copy_(new.contiguous().untyped_storage(), non_blocking=False)


def _by_address(memory: torch.Tensor, new: torch.Tensor) -> None:
    """Write by address, as collectives, fused optimizers and other processes do."""
    ctypes.memmove(memory.data_ptr(), new.data_ptr(), size_bytes(memory))


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "in place": torch.Tensor.copy_,
    "data": _by_data,
    "numpy": _by_numpy,
    "apply": _by_apply,
    "map": _by_map,
    "storage": _by_storage,
    "address": _by_address,
}
"""Ways to write memory from outside. All but the first escape version counters."""


def write(way: str, memory: torch.Tensor, new: torch.Tensor) -> None:
    """Writes `new` over `memory`; a way that does not know a dtype is taken by address."""
    elementwise = way in ("apply", "map") and memory.dtype not in (torch.float32, torch.float64)
    WRITES["address" if elementwise else way](memory, new)
