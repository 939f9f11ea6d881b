"""Manage Encore's own memory pools and streams, as captures use them.

Note [Why not torch.cuda.MemPool]. Its destructor frees memory of the device, and PyTorch raises while any thread
captures a graph. An exception in a destructor ends the process. A failed capture counts as running forever, unless
`end_failed_capture` is called. So a pool here is a counted reference in PyTorch's allocator, and memory is freed by
`torch.cuda.empty_cache`, which skips memory that must not be freed now.

Note [Where random numbers begin]. A graph reads the offset of its random numbers from memory that all graphs of a
generator share. PyTorch 2.11 writes this memory before each replay, on the stream of the replay, and also before each
capture, on the stream of the capture. Nothing orders these writes. If the GPU is busy, the write of a capture may come
after that of the next replay, which then draws the numbers of an old call; or before a running replay has read the
offset. The graphs of `torch.cuda.graph` and of CUDAGraph Trees share this problem.

Note [Failures that cuSOLVER repeats]. After a capture in which cuSOLVER failed, its next call in the same thread fails
as well (`CUSOLVER_STATUS_EXECUTION_FAILED`), although nothing is being captured. That would be a call of the program.
So after such a capture a small problem is solved, and once more if that fails.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.graph.driver import check
from optimizations.graph.memory import MemoryRanges
from optimizations.graph.records import MemoryRange
from optimizations.torch_internals.gpu_state import is_capturing, memory_segments


@contextlib.contextmanager
def in_order(stream: torch.cuda.Stream) -> Iterator[None]:
    """Order what a capture on `stream`, made in the block, enqueues there with the work of the current stream.

    This work runs after the work enqueued on the current stream, and before later work on it. Note [Where random
    numbers begin]. If the capture fails and is still active on `stream`, nothing waits for it.
    """
    outside = torch.cuda.current_stream(stream.device)
    stream.wait_stream(outside)
    try:
        yield
    finally:
        if not is_capturing(stream):
            outside.wait_stream(stream)


NO_POOL = (0, 0)
"""PyTorch's handle for the memory that is in no pool."""

_own: set[Any] = set()


def new_pool() -> Any:
    """Return the handle of a new pool that is registered as Encore's."""
    made = torch.cuda.graph_pool_handle()
    claim(made)
    return made


def claim(pool: Any) -> None:
    """Register a pool that PyTorch made for Encore as Encore's."""
    _own.add(tuple(pool))


def others_have_pools() -> bool:
    """Return whether memory is in pools that are not Encore's: the program may have captured graphs by hand."""
    found = {tuple(one["segment_pool_id"]) for one in memory_segments()}
    return not found <= _own | {NO_POOL}


class Pool:
    """Hold a memory pool, which lives as long as this object or a graph that was captured in it.

    Attributes:
        id: its handle, as `torch.cuda.CUDAGraph.capture_begin` takes it.
    """

    def __init__(self, device: int) -> None:
        self.id: Any = new_pool()
        torch_internals.begin_allocating(device, self.id)  # counts a reference
        torch_internals.end_allocating(device, self.id)
        self.release = weakref.finalize(self, torch_internals.release_pool, device, self.id)
        self.release.atexit = False  # the process's end frees everything


@contextlib.contextmanager
def scratch_pool(device: int) -> Iterator[Any]:
    """Yield the handle of a pool for the block alone. Its memory is freed as Note [Why not torch.cuda.MemPool] says."""
    pool = Pool(device)
    try:
        yield pool.id
    finally:
        size = sum(one.size_bytes for one in pool_memory(pool.id))
        pool.release()
        if size:
            give_back()


def give_back() -> None:
    """Free the device memory of pools that no longer exist, and everything else that the allocator has cached."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


def failed_in_cusolver(error: BaseException | None) -> bool:
    """Return whether an exception, or one that it was raised from, has cuSOLVER's error in its message."""
    while error is not None:
        if "cusolver" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def end_failed_capture(device: int, pool: Any, stream: torch.cuda.Stream, *, in_cusolver: bool) -> None:
    """End a failed capture in `pool`, which PyTorch 2.11 does not end completely.

    The allocator would continue to allocate for it, and never free memory of other pools again. Random generators may
    still be in capture mode, so that the next dropout would fail; a successful empty capture on `stream` resets them.
    If that fails as well, nothing changes.

    `in_cusolver`: see Note [Failures that cuSOLVER repeats].
    """
    with contextlib.suppress(RuntimeError):  # it had ended
        torch_internals.end_allocating(device, pool)
    with (
        contextlib.suppress(RuntimeError),
        warnings.catch_warnings(record=True),
        torch.cuda.device(device),
        in_order(stream),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"),
    ):
        pass
    for _ in range(2 if in_cusolver else 0):
        with contextlib.suppress(RuntimeError):
            torch.linalg.eigvalsh(torch.zeros(2, 2, device=torch.device("cuda", device)))
            return


def pool_memory(pool: Any) -> tuple[MemoryRange, ...]:
    """Return the segments of a memory pool, ascending, with adjacent ones joined."""
    segments = memory_segments(tuple(pool))
    return MemoryRanges(MemoryRange(address=one["address"], size_bytes=one["total_size"]) for one in segments).ranges


def used_memory(pool: Any) -> tuple[MemoryRange, ...]:
    """Return the memory of a pool that is in use now, ascending, with adjacent blocks joined."""
    return MemoryRanges(used_blocks(pool)).ranges


def used_blocks(pool: Any) -> tuple[MemoryRange, ...]:
    """Return the blocks of a memory pool that are in use now: one for each allocation."""
    found = []
    for segment in memory_segments(tuple(pool)):
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                found.append(MemoryRange(address=address, size_bytes=block["size"]))
            address += block["size"]
    return tuple(found)


def own_stream(device: int) -> torch.cuda.Stream:
    """Return a new stream of the device. It is never destroyed.

    Raises:
        CudaCallFailed: the stream cannot be created.
    """
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # the driver needs a current context
        made = check(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
        return torch.cuda.ExternalStream(int(made), device=device)
