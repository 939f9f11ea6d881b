"""Run time of placement: hoisted values kept on the GPU, guarded and refreshed, and arguments staged with each call.

Note [Steady state]
A call in which no attribute changed compares each guarded attribute with what it was, by tuples made beforehand, and
does nothing else for hoisted values. The host waits for the device in one case only: results that the caller gets on
the CPU have to be there when the call returns.

Note [Overwriting in place]
A hoisted value that changed is overwritten where it is, because a new address makes CUDA graphs record again. That is
right as long as nobody still needs the old value. On the device, work is ordered by the stream, and a change of stream
is noticed and waited for there. Autograd may have saved the tensor for a backward yet to come, which shows in reference
counts; then the value gets new memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.placement.feed_plan import Attribute, FeedPlan, HoistedGroup, TensorLayout
from optimizations.placement.selector import selector
from optimizations.placement.sources import Guard
from optimizations.placement.staging import Staging


class Feeds:
    """Arguments of a rewritten graph, from the arguments of its original. Allocates at the first call, on the device.

    One instance belongs to one compiled graph and is called by one thread at a time, as CUDA graphs are.
    """

    def __init__(self, plan: FeedPlan) -> None:
        self._plan = plan
        self._kept = selector(plan.kept)
        self._groups = [_Group(group, plan.device) for group in plan.hoisted]
        self._staging = Staging(plan) if plan.staged else None
        self._stream = _StreamOrder(plan.device, self._device_memory)
        self._hoisted: tuple[torch.Tensor, ...] | None = None
        self._checks = _Checks()

    def bind(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The rewritten graph's arguments for this call."""
        self._stream.follow()
        hoisted = self._hoisted
        if hoisted is None or self._checks.fail(arguments):
            hoisted = self._refresh(arguments)
        if self._staging is None:
            return self._kept(arguments) + hoisted
        return self._kept(arguments) + hoisted + self._staging.stage(arguments)

    def copy_out(self, results: Sequence[Any]) -> tuple[Any, ...]:
        """The results as the caller expects them: those that belong on the CPU are there, ready to be read."""
        returned = list(results)
        for index in self._plan.cpu_outputs:
            returned[index] = returned[index].to("cpu", non_blocking=True)
        self._stream.wait()
        return tuple(returned)

    def release(self) -> None:
        """Gives the device memory back; the next call allocates anew."""
        self._hoisted = None
        for group in self._groups:
            group.release()
        if self._staging is not None:
            self._staging.release()

    def _refresh(self, arguments: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        for group in self._groups:
            if group.checks is None or group.checks.fail(arguments):
                group.refresh(arguments)
        checks = [group.checks for group in self._groups if group.checks is not None]
        self._checks = _Checks.joined(checks)
        self._hoisted = tuple(tensor for group in self._groups for tensor in group.tensors)
        return self._hoisted

    def _device_memory(self) -> list[torch.Tensor]:
        staged = self._staging.buffers() if self._staging is not None else []
        return [*(self._hoisted or ()), *staged]


_Bytes = Callable[[int], Any]
"""Makes an object whose `raw` are the bytes at an address."""


@dataclass(frozen=True, slots=True)
class _Checks:
    """What tells that attributes have the values they had.

    `values` compare bytes: (argument, how to read them, what they were). `versions` compare identity: (argument,
    address, version counter); whoever holds them keeps the memory at that address alive, so that no other tensor can
    turn up there. `constants` are tensors that the graph itself holds: (tensor, version counter).
    """

    values: tuple[tuple[int, _Bytes, bytes], ...] = ()
    versions: tuple[tuple[int, int, int], ...] = ()
    constants: tuple[tuple[torch.Tensor, int], ...] = ()

    def fail(self, arguments: Sequence[Any]) -> bool:
        for index, at, before in self.values:
            if at(arguments[index].data_ptr()).raw != before:
                return True
        for index, address, version in self.versions:
            tensor = arguments[index]
            if tensor.data_ptr() != address or tensor._version != version:
                return True
        return any(constant._version != version for constant, version in self.constants)

    @classmethod
    def joined(cls, parts: Iterable[_Checks]) -> _Checks:
        """All of `parts`, each attribute once."""
        parts = list(parts)
        values = {check[0]: check for part in parts for check in part.values}
        versions = {check[0]: check for part in parts for check in part.versions}
        constants = {id(check[0]): check for part in parts for check in part.constants}
        return cls(tuple(values.values()), tuple(versions.values()), tuple(constants.values()))


class _Group:
    """Hoisted values that depend on the same attributes, on the device."""

    def __init__(self, group: HoistedGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._alive: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        self.checks: _Checks | None = None

    def refresh(self, arguments: Sequence[Any]) -> None:
        """Computes the values on the CPU, as the original graph would, and brings them to the device."""
        attributes = [_value(attribute, arguments) for attribute in self._group.attributes]
        # What is kept has to work in later calls of any mode, so it is not made in this call's.
        with torch.inference_mode(False), torch.no_grad():
            # Before the values: a concurrent write to an attribute then fails the checks of the next call.
            self.checks = self._checks_for(attributes)
            values = self._group.compute(*attributes)
            old: list[torch.Tensor | None] = [*self.tensors] or [None] * len(values)
            self.tensors = list(map(self._upload, values, self._group.layouts, old))

    def release(self) -> None:
        self.tensors = []
        self.checks = None
        self._alive = []

    def _upload(self, value: torch.Tensor, layout: TensorLayout, old: torch.Tensor | None) -> torch.Tensor:
        """See Note [Overwriting in place]."""
        if old is None or _is_used_elsewhere(old):
            old = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=self._device)
        # The source is used up when the copy returns if it is pageable; a pinned one would still be read later.
        return old.copy_(value, non_blocking=not value.is_pinned())

    def _checks_for(self, attributes: Sequence[torch.Tensor]) -> _Checks:
        values: list[tuple[int, _Bytes, bytes]] = []
        versions: list[tuple[int, int, int]] = []
        constants: list[tuple[torch.Tensor, int]] = []
        self._alive = []
        for attribute, tensor in zip(self._group.attributes, attributes, strict=True):
            if attribute.index is None:
                constants.append((tensor, tensor._version))
            elif attribute.guard is Guard.VALUE:
                at = (ctypes.c_char * tensor.nbytes).from_address
                values.append((attribute.index, at, at(tensor.data_ptr()).raw))
            else:
                self._alive.append(tensor.detach())
                versions.append((attribute.index, tensor.data_ptr(), tensor._version))
        return _Checks(tuple(values), tuple(versions), tuple(constants))


class _StreamOrder:
    """Keeps work on shared device memory in order when the caller changes the stream between calls."""

    def __init__(self, device: torch.device, memory: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._device = device
        self._memory = memory
        self._on_gpu = device.type == "cuda"
        self._raw: int | None = None
        self._last: torch.cuda.Stream | None = None

    def follow(self) -> None:
        """Lets the current stream wait, on the device, for the stream of the last call if that was another."""
        if self._on_gpu and torch_internals.current_raw_stream(self._device.index) != self._raw:
            current = torch.cuda.current_stream(self._device)
            if self._last is not None:
                current.wait_stream(self._last)
                for tensor in self._memory():
                    tensor.record_stream(current)
            self._last, self._raw = current, current.cuda_stream

    def wait(self) -> None:
        """Waits on the host for all that was put into the current stream."""
        if self._on_gpu:
            torch.cuda.current_stream(self._device).synchronize()


def _value(attribute: Attribute, arguments: Sequence[Any]) -> Any:
    return attribute.constant if attribute.index is None else arguments[attribute.index]


def _is_used_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether something beside its Python object keeps the tensor or its memory, as a saved tensor does."""
    storage = tensor.untyped_storage()
    # One reference is the tensor's own, one belongs to the local name.
    return torch_internals.tensor_use_count(tensor) > 1 or torch_internals.storage_use_count(storage._cdata) > 2
