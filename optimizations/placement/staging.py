"""Copy the CPU values of one call to the GPU together: one pinned buffer and one asynchronous copy.

Note [Buffers in flight]
A copy reads its pinned buffer after the call has returned, so a buffer is free again only when the event after its
copy has completed. There is a ring of buffers: the next call takes the oldest if it is free, else a new one, and waits
only if `BUFFERS_LIMIT` calls are in flight. One device buffer is sufficient if autograd keeps no arguments: the stream
orders copies and the kernels that read them. If autograd may keep them for backward, each call gets device memory of
its own.

Note [Pinned sources]
A source that is already pinned may have a copy into it in flight. The host does not read it: it is copied directly to
the device, in stream order, after the copy that fills it, as the program's own transfer would be. The host waits for
such a copy if the program would.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.placement.feed_plan import FeedPlan, Source, TensorLayout
from optimizations.placement.guards import is_pinned

ALIGNMENT_BYTES = 64
"""Alignment of tensors in the buffer. Inductor reads inputs in vectors of 16 bytes and checks only some of them."""
BUFFERS_LIMIT = 16
PINNED_LIMIT_BYTES = 256 * 2**20
"""A ring holds at least two buffers, and at most these numbers of buffers and bytes."""
LAYOUTS_LIMIT = 16
LAYOUTS_LIMIT_BYTES = 64 * 2**20
"""Sizes that differ from call to call keep one buffer each; beyond this number of layouts, the oldest is freed."""


class Staging:
    """Copy the staged arguments of one graph to its device."""

    def __init__(self, plan: FeedPlan) -> None:
        self._device = plan.device
        self._keep_addresses = plan.keep_addresses
        self._pick = _picker([staged.source for staged in plan.staged])
        self._layouts = tuple(staged.layout for staged in plan.staged)
        self._awaited = tuple(staged.awaited for staged in plan.staged)
        self._is_static = all(layout.is_static for layout in self._layouts)
        self._fixed: _Area | None = None
        self._by_shape: OrderedDict[tuple[Any, ...], _Area] = OrderedDict()

    def stage(self, arguments: tuple[Any, ...], values: tuple[Any, ...] = ()) -> tuple[torch.Tensor, ...]:
        """Return the staged values on the device, in order. The stream orders their asynchronous copy before readers.

        `arguments` are the original graph's, `values` the results of the evaluation before it.
        """
        tensors = self._pick(arguments, values)
        area = self._fixed
        if area is None:
            area = self._area_for(tensors)
        pinned = tuple(map(is_pinned, tensors))
        return area.send(tensors, pinned, self._awaited) if any(pinned) else area.send(tensors)

    def buffers(self) -> list[torch.Tensor]:
        """Return the device buffers (uint8) that stay between calls."""
        areas = [*self._by_shape.values(), *([self._fixed] if self._fixed is not None else [])]
        return [area.device_buffer for area in areas if area.device_buffer is not None]

    def release(self) -> None:
        self._fixed = None
        self._by_shape.clear()

    def _area_for(self, tensors: Sequence[torch.Tensor]) -> _Area:
        if self._is_static:
            self._fixed = _Area(self._layouts, self._device, self._keep_addresses)
            return self._fixed
        key = tuple((tensor.shape, tensor.stride()) for tensor in tensors)
        area = self._by_shape.get(key)
        if area is None:
            area = _Area([_layout_of_copy(tensor) for tensor in tensors], self._device, self._keep_addresses)
            held = sum(other.size_bytes for other in self._by_shape.values()) + area.size_bytes
            while self._by_shape and (len(self._by_shape) >= LAYOUTS_LIMIT or held > LAYOUTS_LIMIT_BYTES):
                _, oldest = self._by_shape.popitem(last=False)
                held -= oldest.size_bytes
            if held <= LAYOUTS_LIMIT_BYTES:
                self._by_shape[key] = area
        return area


def _picker(sources: Sequence[Source]) -> Any:
    """Return a function from arguments and values to the tensors that `sources` name."""
    places = tuple((source.where == "before", source.index) for source in sources)

    def pick(arguments: Sequence[Any], values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        return tuple([values[index] if before else arguments[index] for before, index in places])

    return pick


class _Area:
    """Hold the buffers for one set of layouts."""

    def __init__(self, layouts: Sequence[TensorLayout], device: torch.device, keep_address: bool) -> None:
        self._layouts = tuple(layouts)
        self._device = device
        self._starts: list[int] = []
        self.size_bytes = 0
        for layout in layouts:
            self._starts.append(self.size_bytes)
            self.size_bytes += -(-layout.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._buffers_limit = min(BUFFERS_LIMIT, max(2, PINNED_LIMIT_BYTES // max(self.size_bytes, 1)))
        self._ring: deque[_HostBuffer] = deque()
        self.device_buffer: torch.Tensor | None = None
        self._device_views: tuple[torch.Tensor, ...] = ()
        if keep_address:
            self.device_buffer = self._device_memory()
            self._device_views = self._carved(self.device_buffer)

    def send(
        self, tensors: Sequence[torch.Tensor], pinned: Sequence[bool] = (), awaited: Sequence[bool] = ()
    ) -> tuple[torch.Tensor, ...]:
        """Copy tensors to the device and return them there. Note [Pinned sources] is on `pinned` and `awaited` ones."""
        if self.device_buffer is not None:
            memory, views = self.device_buffer, self._device_views
        else:
            memory = self._device_memory()
            views = self._carved(memory)
        direct = [position for position, is_direct in enumerate(pinned) if is_direct]
        if len(direct) < len(tensors):
            host = self._free_host_buffer()
            pairs = [(host.views[i], tensors[i]) for i in range(len(tensors)) if i not in direct]
            torch_internals.foreach_copy_([view for view, _ in pairs], [tensor for _, tensor in pairs])
            memory.copy_(host.memory, non_blocking=True)
            host.sent()
        for position in direct:
            copy_in_stream_order(views[position], tensors[position], wait=awaited[position])
        return views

    def _free_host_buffer(self) -> _HostBuffer:
        """Return a pinned buffer that no copy is reading. See Note [Buffers in flight]."""
        if self._ring and self._ring[0].is_free():
            self._ring.rotate(-1)
        elif len(self._ring) < self._buffers_limit:
            with torch_internals.InferenceMode(False):
                pinned = self._device.type == "cuda"
                memory = torch.empty(self.size_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                self._ring.append(_HostBuffer(memory, self._carved(memory), self._device))
        else:
            self._ring[0].wait()
            self._ring.rotate(-1)
        return self._ring[-1]

    def _device_memory(self) -> torch.Tensor:
        # Memory made in inference mode could not be written outside of it.
        with torch_internals.InferenceMode(False):
            return torch.empty(self.size_bytes, dtype=torch.uint8, device=self._device)

    def _carved(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch_internals.InferenceMode(False):
            return tuple(
                memory[start : start + layout.size_bytes].view(layout.dtype).as_strided(layout.shape, layout.stride)
                for start, layout in zip(self._starts, self._layouts, strict=True)
            )


def copy_in_stream_order(destination: torch.Tensor, source: torch.Tensor, *, wait: bool) -> None:
    """Copy `source` on the device after all earlier work of the stream. See Note [Pinned sources]."""
    destination.copy_(source, non_blocking=not wait)


class _HostBuffer:
    """Hold pinned memory, and the event after the last copy that read it."""

    def __init__(self, memory: torch.Tensor, views: tuple[torch.Tensor, ...], device: torch.device) -> None:
        self.memory = memory
        self.views = views
        self._device = device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def sent(self) -> None:
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))

    def is_free(self) -> bool:
        return self._copied is None or self._copied.query()

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()


def _layout_of_copy(tensor: torch.Tensor) -> TensorLayout:
    copy = torch.empty_like(tensor, device="meta")
    return TensorLayout(tuple(copy.shape), tuple(copy.stride()), copy.dtype)
