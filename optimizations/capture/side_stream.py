"""Provide streams for warm-up and capture whose cuBLAS workspaces no other code is ever given.

cuBLAS computes in a workspace, which PyTorch allocates when a thread's handle first works on a stream, and keeps. A
captured kernel has its address. Warm-up and capture have to be on one stream: what autograd keeps of a warm-up, the
nodes that add to gradients, belongs to it. So the workspace is there before the capture, in the memory that all tensors
come from.

Note [Workspaces are freed]. CUDAGraph Trees free the workspaces of all streams at each recording. A tensor may lie
there next, and a graph that was captured before writes into it. Freeing them before Encore's own captures, so that
those have them in their pools, would do the same to others: a graph that the program captured by hand may have the
address of any workspace. So those of a `SideStream` are allocated in a pool of its own, before anything else runs on
it. Freed, they go back to that pool, from which nothing else is allocated, and the next use takes them again. Two
things can put one elsewhere. Something else may use the stream: so it is not one of the 32 that PyTorch gives everybody
in turn. Or workspaces are freed during a warm-up, or of a capture, by a recording in another thread.
`keep_workspaces` notices both, so it is called again after each capture: PyTorch does not tell where a workspace lies,
but one that is not there yet is allocated where it is told to.

Note [Memory of two streams]. Gradients and results of a warm-up are in memory of the side stream. The program works
with them on its own stream and lets them go, and the side stream may have that memory again at once, while the other
stream is still to read it. So nothing is given to the side stream, not even a number to run a backward with, before it
waits for the stream that is current, and for all others that were: the program may have gone on working there.
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.graph.pools import Pool, own_stream, pool_memory
from optimizations.graph.records import MemoryRange
from optimizations.torch_internals.gpu_state import is_capturing, is_pytorchs, memory_segments

ATTEMPTS = 4
"""Streams that are tried, the last one new. One that takes no workspace either means that this PyTorch keeps none."""

_idle: defaultdict[int, list[SideStream]] = defaultdict(list)


class SideStream:
    """Keep a stream of a device, and the pool of its workspaces.

    Attributes:
        stream: it is used for nothing else.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self.stream = own_stream(device)
        self._pool = Pool(device)
        self._kept: dict[int, int] = {}
        self._followed: dict[int, torch.cuda.Stream] = {}

    def follow(self) -> None:
        """Let the stream wait for what the current stream, and those that were so here before, were given so far.

        Note [Memory of two streams].

        A stream that PyTorch did not make may be gone when another one is current, so it is forgotten then.
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
            Whether the workspaces of this thread and of autograd's lie in the pool.

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

    def workspaces(self) -> list[MemoryRange]:
        """Return where the workspaces lie."""
        return list(pool_memory(self._pool.id))

    def keeps_workspace(self) -> bool:
        """Return whether `keep_workspaces` has seen to the current thread, and the current stream is this one."""
        if not self._kept:
            return True  # there was no memory for it, and no capture is made before there is
        here = torch_internals.current_raw_stream(self._device) == self.stream.cuda_stream
        return here and torch.cuda.current_blas_handle() in self._kept

    def _keep(self) -> bool:
        """Keep the workspaces of the current thread, on the current stream, as `keep_workspaces` does."""
        before = self._blocks()
        torch_internals.begin_allocating(self._device, self._pool.id)
        try:
            handle = torch.cuda.current_blas_handle()
            if os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") == "0":  # cuBLASLt has workspaces of its own then
                some = torch.ones(16, 16, device="cuda")
                torch.addmm(some[0], some, some)
                del some
        finally:
            torch_internals.end_allocating(self._device, self._pool.id)
            torch_internals.release_pool(self._device, self._pool.id)  # what the beginning counted
        if handle not in self._kept and (taken := self._blocks() - before):
            self._kept[handle] = taken
        return handle in self._kept

    def _blocks(self) -> int:
        """Count the blocks of the pool that are in use."""
        segments = memory_segments(self._pool.id)
        return sum(block["state"] == "active_allocated" for segment in segments for block in segment["blocks"])


class SideStreams:
    """Keep the side stream of one owner, and those it had. They serve others when it is gone.

    Nothing is made before it is needed: an owner may be made inside of a capture.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._used: list[SideStream] = []
        weakref.finalize(self, _idle[device].extend, self._used).atexit = False
        self._keeps = True

    @property
    def _last(self) -> SideStream:
        if not self._used:
            self._take()
        return self._used[-1]

    @property
    def current(self) -> torch.cuda.Stream:
        """Return the stream to warm up and to capture on."""
        return self._last.stream

    def ready(self) -> bool:
        """Keep its workspaces; return False if that took another stream than the current one.

        Raises:
            torch.OutOfMemoryError: the GPU's memory does not suffice for them.
        """
        if not self._keeps or self._last.keep_workspaces():
            return True
        for left in reversed(range(ATTEMPTS)):  # graphs may write to the workspaces of the one before, so it stays
            self._take(new=not left)
            if self._last.keep_workspaces():
                return False
        self._keeps = False
        return False

    def follow(self) -> None:
        """Call `SideStream.follow` of the stream to warm up on."""
        self._last.follow()

    def keeps_workspace(self) -> bool:
        """Return whether a product of matrices that runs now computes in a workspace that is kept."""
        return not (self._keeps and self._used) or self._used[-1].keeps_workspace()

    def workspaces(self) -> list[MemoryRange]:
        """Return where the workspaces of the stream to capture on lie."""
        return self._used[-1].workspaces() if self._used else []

    def _take(self, *, new: bool = False) -> None:
        if new or not (idle := _idle[self._device]):
            self._used.append(SideStream(self._device))
            return
        self._used.append(idle.pop())
        torch.cuda.synchronize(self._device)  # graphs of the owner before may still run


def _run_in_backward(device: int, do: Callable[[], object]) -> None:
    """Run it in autograd's thread of the device, on the current stream."""
    with torch.inference_mode(False), torch.enable_grad(), torch.cuda.device(device):
        leaf = torch.zeros(1, device=torch.device("cuda", device), requires_grad=True)
        torch.autograd.grad(_Backward.apply(leaf, do), leaf, torch.zeros_like(leaf))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, do: Callable[[], object]) -> torch.Tensor:
        ctx.do = do
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.do()
        return tangent, None
