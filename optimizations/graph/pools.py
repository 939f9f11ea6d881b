"""Manage Encore's own memory pools and streams, as captures use them.

Note [Why not torch.cuda.MemPool]. Its destructor gives memory back to the device, and PyTorch refuses that with an
exception while any thread captures a graph. An exception in a destructor ends the process. A failed capture counts as
under way for ever, unless `end_failed_capture` is called. So a pool here is a reference that PyTorch's allocator
counts, and memory is given back by `torch.cuda.empty_cache`, which leaves alone what it must.

Note [Where random numbers begin]. A graph reads from memory where its random numbers begin, and all graphs of a
generator read the same. PyTorch 2.11 writes there before each replay, on the stream of the replay, and also before each
capture, on the stream of the capture. Nothing orders these writes. If the GPU is busy, that of a capture may come after
that of the next replay, which then draws the numbers of a call long ago; or before a replay that is under way has read.
The graphs of `torch.cuda.graph`, and of CUDAGraph Trees, have this in common.

Note [Failures that cuSOLVER repeats]. After a capture in which cuSOLVER failed, its next call of the same thread fails
as well (`CUSOLVER_STATUS_EXECUTION_FAILED`), although nothing is being captured any more. That call would be the
program's. So after such a capture a small problem is solved, and once more if that fails.
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

    It runs after what was enqueued on the current stream, and before what is enqueued on it next. Note [Where random
    numbers begin]. Where the capture fails, and is still under way on `stream`, nothing waits for it.
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
    """Return the handle of a pool that is known to be Encore's."""
    made = torch.cuda.graph_pool_handle()
    claim(made)
    return made


def claim(pool: Any) -> None:
    """Note that a pool that PyTorch made for Encore is Encore's."""
    _own.add(tuple(pool))


def others_have_pools() -> bool:
    """Return whether memory lies in pools that are not Encore's: the program may have captured graphs by hand."""
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
    """Return whether cuSOLVER's error is an exception's message, or that of one before it."""
    while error is not None:
        if "cusolver" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def end_failed_capture(device: int, pool: Any, stream: torch.cuda.Stream, *, in_cusolver: bool) -> None:
    """End a capture in `pool` that failed, which PyTorch 2.11 leaves half under way.

    The allocator would go on allocating for it, and never free memory of other pools again. And random generators may
    still be capturing, so that the next dropout would fail; an empty capture that succeeds, on `stream`, takes them out
    of it. If that fails as well, things are as they were.

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
    """Return the segments of a memory pool, ascending, those that adjoin joined."""
    return MemoryRanges(_segments(pool)).ranges


def used_memory(pool: Any) -> tuple[MemoryRange, ...]:
    """Return the memory of a pool that is in use now, ascending, adjoining blocks joined."""
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


def _segments(pool: Any) -> list[MemoryRange]:
    found = memory_segments(tuple(pool))
    return [MemoryRange(address=one["address"], size_bytes=one["total_size"]) for one in found]


class SmallSegments:
    """Hold the segments of a memory pool up to a size. The allocator is queried where an address is in none so far."""

    def __init__(self, pool: Any, most_bytes: int) -> None:
        self._pool = pool
        self._most_bytes = most_bytes
        self._known = MemoryRanges(())
        self._small = MemoryRanges(())
        self._elsewhere: set[int] = set()

    def hold(self, address: int) -> bool:
        """Return whether an address lies in one of them."""
        if address not in self._known and address not in self._elsewhere:
            found = _segments(self._pool)
            self._known = MemoryRanges(found)
            self._small = MemoryRanges(one for one in found if one.size_bytes <= self._most_bytes)
            if address not in self._known:
                self._elsewhere.add(address)
        return address in self._small


def own_stream(device: int) -> torch.cuda.Stream:
    """Return a new stream of the device. It lasts as long as the process.

    Raises:
        CudaCallFailed: there is none.
    """
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # the driver needs a current context
        made = check(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
        return torch.cuda.ExternalStream(int(made), device=device)
