"""Provide streams for warm-up and capture with private cuBLAS workspaces.

cuBLAS computes in a workspace. PyTorch allocates it when a thread's handle first works on a stream, and keeps it. A
captured kernel contains its address. Warm-up and capture must use the same stream, because autograd's nodes that
accumulate gradients belong to the stream of the warm-up. So the workspace exists before the capture, and is by default
in the same memory as all tensors.

Note [Workspaces are freed]. CUDAGraph Trees free the workspaces of all streams at each recording. A tensor may be
allocated there next, and an earlier graph would overwrite it. If Encore freed the workspaces before its own captures,
so that they are allocated in its pools, other graphs would be broken: one that the program captured may contain the
address of any workspace. So the workspaces of a `SideStream` are allocated in a separate pool, before anything else
runs on the stream. Freed workspaces return to that pool, from which nothing else is allocated, and are used again. Two
events can place a workspace elsewhere. Other code may use the stream: so it is not one of PyTorch's 32 pooled streams.
Or a recording in another thread frees workspaces during a warm-up or capture. `keep_workspaces` detects both, so it is
called again after each capture. PyTorch does not report the address of a workspace, but a missing workspace is
allocated in the pool that is active.

Note [Memory of two streams]. Gradients and results of a warm-up are allocated on the side stream. The program uses them
on its own stream and frees them. The side stream could then reuse that memory while the other stream still reads it. So
before any work on the side stream, it waits for the current stream and for all earlier current streams, on which the
program may have continued.
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Callable

import torch

from optimizations import torch_internals
from optimizations.graph.pools import Pool, own_stream, pool_memory
from optimizations.graph.records import MemoryRange
from optimizations.torch_internals.gpu_state import is_capturing, is_pytorchs, memory_segments

ATTEMPTS = 4
"""New streams that are tried. If none gets a workspace, this version of PyTorch keeps none."""

_idle: defaultdict[int, list[SideStream]] = defaultdict(list)


class SideStream:
    """Hold a private stream of a device, and the pool of its workspaces."""

    def __init__(self, device: int) -> None:
        self._device = device
        self.stream = own_stream(device)
        self.pool = Pool(device)
        self._kept: dict[int, int] = {}
        self._followed: dict[int, torch.cuda.Stream] = {}

    def follow(self) -> None:
        """Let the stream wait for the current stream and for all that were current in earlier calls of this method.

        Note [Memory of two streams]. A stream that PyTorch did not make may be destroyed later, so it is only waited
        for while it is current.
        """
        current = torch.cuda.current_stream(self._device)
        self._followed = {raw: stream for raw, stream in self._followed.items() if is_pytorchs(stream)}
        self._followed[current.cuda_stream] = current
        for stream in self._followed.values():
            if stream is current or not is_capturing(stream):
                self.stream.wait_stream(stream)

    def keep_workspaces(self) -> bool:
        """Keep workspaces in the pool, before the calling thread works on the stream. Note [Workspaces are freed].

        Returns:
            Whether the workspaces of this thread and of autograd's thread are in the pool.

        Raises:
            torch.OutOfMemoryError: the GPU's memory does not suffice for them.
        """
        if self._blocks() < sum(self._kept.values()):
            self._kept.clear()  # all were freed
        self.follow()
        with torch.cuda.device(self._device), torch.cuda.stream(self.stream):
            found = [self._keep()]
            _run_in_backward(self._device, lambda: found.append(self._keep()))
        return all(found)

    def keeps_workspace(self) -> bool:
        """Return whether `keep_workspaces` prepared the current thread, and this stream is the current one."""
        if not self._kept:
            return True  # there was not enough memory, and no capture is made without it
        here = torch_internals.current_raw_stream(self._device) == self.stream.cuda_stream
        return here and torch.cuda.current_blas_handle() in self._kept

    def _keep(self) -> bool:
        """Allocate the workspaces of the current thread and stream in the pool."""
        before = self._blocks()
        torch_internals.begin_allocating(self._device, self.pool.id)
        try:
            handle = torch.cuda.current_blas_handle()
            if os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") == "0":  # cuBLASLt then has separate workspaces
                some = torch.ones(16, 16, device="cuda")
                torch.addmm(some[0], some, some)
                del some
        finally:
            torch_internals.end_allocating(self._device, self.pool.id)
            torch_internals.release_pool(self._device, self.pool.id)  # the reference that the beginning counted
        if handle not in self._kept and (taken := self._blocks() - before):
            self._kept[handle] = taken
        return handle in self._kept

    def _blocks(self) -> int:
        """Count the blocks of the pool that are in use."""
        segments = memory_segments(self.pool.id)
        return sum(block["state"] == "active_allocated" for segment in segments for block in segment["blocks"])


class SideStreams:
    """Hold the current and earlier side streams of one owner. They are reused after the owner is freed.

    Streams are made when they are first needed, because an owner may be created during a capture.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._used: list[SideStream] = []
        weakref.finalize(self, _idle[device].extend, self._used).atexit = False
        self._keeps = True

    @property
    def last(self) -> SideStream:
        """Return the side stream to warm up and to capture on."""
        if not self._used and (idle := _idle[self._device]):
            self._used.append(idle.pop())
            torch.cuda.synchronize(self._device)  # graphs of the previous owner may still run
        elif not self._used:
            self._used.append(SideStream(self._device))
        return self._used[-1]

    @property
    def current(self) -> torch.cuda.Stream:
        """Return the stream of `last`."""
        return self.last.stream

    def ready(self) -> bool:
        """Keep its workspaces; return False if a different stream was needed for that.

        Raises:
            torch.OutOfMemoryError: the GPU's memory does not suffice for them.
        """
        if not self._keeps or self.last.keep_workspaces():
            return True
        for _ in range(ATTEMPTS):  # graphs may write to workspaces of the previous stream, so it is kept
            self._used.append(SideStream(self._device))
            if self.last.keep_workspaces():
                return False
        self._keeps = False
        return False

    def keeps_workspace(self) -> bool:
        """Return whether cuBLAS uses a kept workspace in this thread, on the current stream."""
        return not (self._keeps and self._used) or self._used[-1].keeps_workspace()

    def workspaces(self) -> list[MemoryRange]:
        """Return the memory of the workspaces of the stream to capture on."""
        return list(pool_memory(self.last.pool.id))


def _run_in_backward(device: int, do: Callable[[], None]) -> None:
    """Run a function in autograd's thread of the device, on the current stream."""
    with torch.inference_mode(False), torch.enable_grad(), torch.cuda.device(device):
        leaf = torch.zeros(1, device=torch.device("cuda", device), requires_grad=True)
        result = leaf.clone()
        result.register_hook(lambda tangent: do())
        torch.autograd.grad(result, leaf, torch.zeros_like(leaf))
