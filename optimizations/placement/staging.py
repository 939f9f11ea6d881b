"""Staging: all CPU arguments of one call go over in one pinned buffer and one asynchronous copy.

Note [Buffers in flight]
A copy reads its pinned buffer after the call has returned, so a buffer is free again only when the event behind its
copy has passed. There is a ring of buffers: the next call takes the oldest if it is free, else a new one, and waits
only when `BUFFERS_LIMIT` calls are in flight. On the device one buffer is enough where nobody keeps arguments: copies
and the kernels that read them follow one another on the stream. Where autograd may keep them for backward, each call
gets device memory of its own.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.placement.feed_plan import FeedPlan, TensorLayout
from optimizations.placement.selector import selector

ALIGNMENT_BYTES = 64
"""Where tensors start in the buffer. Inductor reads inputs in vectors of 16 bytes and checks only some of them."""
BUFFERS_LIMIT = 16
LAYOUTS_LIMIT = 16
"""Sizes that differ from call to call keep one buffer each; of more layouts than these, the oldest is given up."""


class Staging:
    """Brings the staged arguments of one graph to its device."""

    def __init__(self, plan: FeedPlan) -> None:
        self._device = plan.device
        self._keep_addresses = plan.keep_addresses
        self._select = selector(plan.staged)
        self._layouts = plan.staged_layouts
        self._is_static = all(layout.is_static for layout in plan.staged_layouts)
        self._fixed: _Area | None = None
        self._by_shape: OrderedDict[tuple[torch.Size, ...], _Area] = OrderedDict()

    def stage(self, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """The staged arguments on the device, in order. The copy is under way; the stream orders it before readers."""
        tensors = self._select(arguments)
        area = self._fixed
        if area is None:
            area = self._area_for(tensors)
        return area.send(tensors)

    def buffers(self) -> list[torch.Tensor]:
        """Device memory that stays between calls."""
        areas = [*self._by_shape.values(), *([self._fixed] if self._fixed is not None else [])]
        return [area.device_buffer for area in areas if area.device_buffer is not None]

    def release(self) -> None:
        self._fixed = None
        self._by_shape.clear()

    def _area_for(self, tensors: Sequence[torch.Tensor]) -> _Area:
        if self._is_static:
            self._fixed = _Area(self._layouts, self._device, self._keep_addresses)
            return self._fixed
        shapes = tuple(tensor.shape for tensor in tensors)
        area = self._by_shape.get(shapes)
        if area is None:
            if len(self._by_shape) == LAYOUTS_LIMIT:
                self._by_shape.popitem(last=False)
            area = _Area([_layout_of_copy(tensor) for tensor in tensors], self._device, self._keep_addresses)
            self._by_shape[shapes] = area
        return area


class _Area:
    """Buffers for one set of layouts."""

    def __init__(self, layouts: Sequence[TensorLayout], device: torch.device, keep_address: bool) -> None:
        self._layouts = tuple(layouts)
        self._device = device
        self._starts: list[int] = []
        self._size = 0
        for layout in layouts:
            self._starts.append(self._size)
            self._size += -(-_size_bytes(layout) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._ring: deque[_HostBuffer] = deque()
        self.device_buffer: torch.Tensor | None = None
        self._device_views: tuple[torch.Tensor, ...] = ()
        if keep_address:
            self.device_buffer = self._device_memory()
            self._device_views = self._carved(self.device_buffer)

    def send(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        host = self._free_host_buffer()
        torch_internals.foreach_copy_(host.views, tensors)
        if self.device_buffer is not None:
            self.device_buffer.copy_(host.memory, non_blocking=True)
            views = self._device_views
        else:
            memory = self._device_memory()
            memory.copy_(host.memory, non_blocking=True)
            views = self._carved(memory)
        host.sent(self._device)
        return views

    def _free_host_buffer(self) -> _HostBuffer:
        """See Note [Buffers in flight]."""
        if self._ring and self._ring[0].is_free():
            self._ring.rotate(-1)
        elif len(self._ring) < BUFFERS_LIMIT:
            with torch.inference_mode(False):
                pinned = self._device.type == "cuda"
                memory = torch.empty(self._size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                self._ring.append(_HostBuffer(memory, self._carved(memory)))
        else:
            self._ring[0].wait()
            self._ring.rotate(-1)
        return self._ring[-1]

    def _device_memory(self) -> torch.Tensor:
        # Memory made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            return torch.empty(self._size, dtype=torch.uint8, device=self._device)

    def _carved(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.inference_mode(False):
            return tuple(
                memory[start : start + _size_bytes(layout)].view(layout.dtype).as_strided(layout.shape, layout.stride)
                for start, layout in zip(self._starts, self._layouts, strict=True)
            )


class _HostBuffer:
    """Pinned memory, and the event behind the last copy that read it."""

    def __init__(self, memory: torch.Tensor, views: tuple[torch.Tensor, ...]) -> None:
        self.memory = memory
        self.views = views
        self._copied: torch.cuda.Event | None = None

    def sent(self, device: torch.device) -> None:
        if device.type != "cuda":
            return
        if self._copied is None:
            self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(device))

    def is_free(self) -> bool:
        return self._copied is None or self._copied.query()

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()


def _size_bytes(layout: TensorLayout) -> int:
    return torch.Size(layout.shape).numel() * layout.dtype.itemsize


def _layout_of_copy(tensor: torch.Tensor) -> TensorLayout:
    copy = torch.empty_like(tensor, device="meta")
    return TensorLayout(tuple(copy.shape), tuple(copy.stride()), copy.dtype)
