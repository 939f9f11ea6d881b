"""Estimate the least GPU memory a workload needs: from fake tensors, before anything is put on a GPU.

Eager runs in every cell, because results are compared with its own. What its forward holds at once, a training
workload's saved activations included, must therefore fit together with the weights and all input sets. Caching,
alignment, libraries' workspaces and the rest of backward come on top: a workload that needs more than the GPU has
cannot run, and one that needs less may still not fit.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from models.instance import autocast_dtype, instantiate
from models.registry import Size, Workload
from optimizations import torch_internals
from optimizations.byte_units import format_bytes
from suite.measure.known_values import KnownValuesMode, UnknownValue
from suite.measure.results import named_tensors
from suite.worker.protocol import OomExpected, OomTogether

LIMIT_OPERATORS = 20_000
"""Operators that are followed: more than any single pass of a model has. What repeats itself beyond, such as steps of
generation, is not worth the wait."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Hold the bytes on the GPU of one workload.

    Attributes:
        weights: parameters and buffers, shared ones once.
        inputs: one input set.
        tangents: in training, the gradients that come into backward, one for each output that can have one.
        peak: the most that one eager iteration holds at once, weights and one input set included; in training at least
            weights and gradients together.
        whole: False if `peak` is that of a part only: up to where the forward reads data that fake tensors do not
            have, or of its first `LIMIT_OPERATORS` operators.
    """

    weights: int
    inputs: int
    tangents: int
    peak: int
    whole: bool

    def with_input_sets(self, count: int) -> int:
        """Return what a cell needs that holds `count` input sets."""
        return self.peak + (count - 1) * self.inputs

    def beyond(self, available: int, input_sets: int) -> str | None:
        """Return what to say if a GPU with `available` bytes is too small; None if it may be enough."""
        needed = self.with_input_sets(input_sets)
        if needed <= available:
            return None
        parts = f"weights {format_bytes(self.weights)}, {input_sets} input sets of {format_bytes(self.inputs)}"
        return (
            f"needs at least {format_bytes(needed)} ({parts}, the rest for what eager computes) and the GPU has "
            f"{format_bytes(available)}; use a GPU with more memory, or --size tiny"
        )


def require_memory(
    workload: Workload, *, variant: str | None, size: Size, input_sets: int, available: int, cells: int = 1
) -> int | None:
    """Check that `available` bytes of a GPU may be enough for so many cells of `workload` at the same time.

    What eager needs stands for all of them: between two calls, a cell holds what its program took at most.

    A workload that cannot be estimated passes, and the log says why: one that builds itself where it runs (a model of
    TorchBench may load files), or whose code does not run on fake tensors.

    Returns:
        What one needs; None where it cannot be estimated.

    Raises:
        OomExpected: they are not enough for one.
        OomTogether: they are for one, but not for all.
    """
    if workload.builds_on_device:
        print(f"{workload.acronym}: memory not estimated, because the model is built where it runs")
        return None
    try:
        need = memory_need(workload, variant=variant, size=size)
    except Exception:  # a program may do anything with tensors that have no data; then it is just tried
        traceback.print_exc()
        print(f"{workload.acronym}: memory not estimated")
        return None
    if message := need.beyond(available, input_sets):
        raise OomExpected(message)
    together = cells * need.with_input_sets(input_sets)
    if together > available:
        raise OomTogether(
            f"{cells} modes at the same time need at least {format_bytes(together)}, and the GPU has "
            f"{format_bytes(available)}"
        )
    return need.with_input_sets(input_sets)


def memory_need(workload: Workload, *, variant: str | None = None, size: Size = "full") -> MemoryNeed:
    """Return the least memory of `workload`, by one eager forward on fake CUDA tensors. Needs no GPU; takes seconds.

    Sets the global seeds, as building a workload does.
    """
    training = workload.task == "training"
    mode = KnownValuesMode()
    with mode:
        instance = instantiate(workload, variant=variant, size=size, device="cuda", seed=0)
        with mode.random_values():
            made = instance.inputs(0)
        held = _Held()
        weights = held.take([*instance.module.parameters(), *instance.module.buffers()])
        inputs = held.take(tensor for _, tensor in named_tensors([*made.args, dict(made.kwargs)]))
        output: Any = None
        try:
            with _followed(held), torch.set_grad_enabled(workload.enables_gradients), _autocast(workload):
                output = instance.module(*made.args, **made.kwargs)
            whole = True
        except (UnknownValue, _Enough):
            whole = False
        trained = [parameter for parameter in instance.module.parameters() if parameter.requires_grad]
        gradients = sum(_bytes(parameter) for parameter in trained) if training else 0
        tangents = {id(tensor): tensor for _, tensor in named_tensors(output) if training and tensor.requires_grad}
        return MemoryNeed(
            weights=weights,
            inputs=inputs,
            tangents=sum(_bytes(tensor) for tensor in tangents.values()),
            peak=max(held.peak, weights + inputs + gradients),
            whole=whole,
        )


class _Enough(Exception):
    """Report that as many operators were followed as are to be."""


@dataclass(slots=True)
class _Held:
    """Count storages on the GPU that live now, each once, and the most that lived at a time, in bytes."""

    now: int = 0
    peak: int = 0
    known: set[int] = field(default_factory=set)

    def take(self, tensors: Iterable[torch.Tensor]) -> int:
        """Count the storages of these that are not counted yet, until they are freed. Returns their bytes."""
        taken = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if tensor.device.type != "cuda" or key in self.known:
                continue
            size = storage.nbytes()
            self.known.add(key)
            weakref.finalize(storage, self._release, key, size)
            taken += size
        self.now += taken
        self.peak = max(self.peak, self.now)
        return taken

    def _release(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def _followed(held: _Held) -> AbstractContextManager[Any]:
    """Return a mode under which `held` takes the result of every operator, and which ends the program at the limit."""
    followed = 0

    class Following(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal followed
            if followed == LIMIT_OPERATORS:
                raise _Enough
            followed += 1
            result = func(*args, **(kwargs or {}))
            held.take(leaf for leaf in torch_internals.pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
            return result

    return Following()


@contextmanager
def _autocast(workload: Workload) -> Iterator[None]:
    """Use autocast under an amp policy, as on a GPU: `torch.autocast` does nothing where there is none."""
    dtype = autocast_dtype(workload.dtype_policy, "cuda")
    if dtype is None:
        yield
        return
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()  # of casted weights, as on leaving `torch.autocast`
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
