"""PyTorch's allocator and cuBLAS's workspaces as far as streams, pools, threads and what is freed go, without a GPU.

As in `CUDACachingAllocator.cpp` and `CublasHandlePool.cpp`: memory that is free is found again by its stream and its
pool only, and of pools only what is not referenced is given back to the device. A workspace is allocated when a
thread's handle is first used on a stream, in the pool that allocations of this thread go to. It is kept until all
workspaces are freed.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optimizations import torch_internals
from optimizations.capture import side_stream
from optimizations.graph import pools, recapture

DEFAULT = (0, 0)


def aligned(elements: int, offset: int = 0) -> torch.Tensor:
    """Float memory aligned as PyTorch's CUDA allocator aligns it, `offset` elements on."""
    memory = torch.zeros(elements + offset + 128)
    skip = -(memory.data_ptr() // 4) % 128 + offset
    return memory[skip : skip + elements]


@dataclass(eq=False)
class Block:
    """Memory. `owner` is what has it now, None while it is free; `gone` once it was given back to the device."""

    stream: int
    pool: tuple[int, int]
    number: int
    owner: Any = None
    gone: bool = False


EXTERNAL = 500
"""Streams from this number on are not PyTorch's."""


def stream_id(number: int) -> int:
    """PyTorch's number of a stream."""
    return number * 2 if number >= EXTERNAL or not number else number * 2 + 1


@dataclass
class Workspaces:
    """`caches`: whether PyTorch keeps workspaces at all. `full`: whether all memory is used up."""

    blocks: list[Block] = field(default_factory=list)
    kept: dict[tuple[int, int], Block] = field(default_factory=dict)
    held: dict[tuple[int, int], int] = field(default_factory=dict)
    caches: bool = True
    full: bool = False
    streams: int = 100
    waits: list[int] = field(default_factory=list)
    given: list[tuple[int, str, int]] = field(default_factory=list)
    """The work of streams: waits for other streams, and work with memory."""
    capturing: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self._routed: dict[int, list[tuple[int, int]]] = {}
        self._here = threading.local()

    # Streams and handles.

    @property
    def stream(self) -> int:
        return getattr(self._here, "stream", 0)

    @stream.setter
    def stream(self, number: int) -> None:
        self._here.stream = number

    @property
    def waited(self) -> list[tuple[int, int]]:
        """Pairs of streams of which the first waits for the second."""
        return [(one, other) for one, what, other in self.given if what == "waits for"]

    @property
    def handle(self) -> int:
        """Return the cuBLAS handle of this thread."""
        if not hasattr(self._here, "handle"):
            self._here.handle = 1000 + next(self._numbers)
        return int(self._here.handle)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self._here.stream = self.stream, int(getattr(stream, "cuda_stream", stream))
        try:
            yield
        finally:
            self._here.stream = before

    def stream_of(self, number: int) -> Any:
        def wait_stream(other: Any) -> None:
            self.given.append((number, "waits for", other.cuda_stream))

        return SimpleNamespace(cuda_stream=number, stream_id=stream_id(number), wait_stream=wait_stream)

    def new_stream(self, device: int) -> Any:
        self.streams += 1
        return self.stream_of(self.streams)

    # The allocator.

    def new_pool(self) -> tuple[int, int]:
        return 0, next(self._numbers)

    def begin(self, device: int, pool: tuple[int, int]) -> None:
        self.held[pool] = self.held.get(pool, 0) + 1
        self._routed.setdefault(threading.get_ident(), []).append(pool)

    def end(self, device: int, pool: tuple[int, int]) -> None:
        for routed in self._routed.values():
            if pool in routed:
                routed.remove(pool)
                return
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    def release(self, device: int, pool: tuple[int, int]) -> None:
        self.held[pool] -= 1

    def allocate(self, owner: Any) -> Block:
        routed = self._routed.get(threading.get_ident(), [])
        pool = routed[0] if routed else DEFAULT
        free = (one for one in self.blocks if (one.stream, one.pool) == (self.stream, pool) and one.owner is None)
        if (found := next(free, None)) is None:
            if self.full:
                raise torch.OutOfMemoryError("no memory")
            found = Block(self.stream, pool, next(self._numbers))
            self.blocks.append(found)
        found.owner = owner
        return found

    def empty_cache(self) -> None:
        for one in self.blocks:
            one.gone = one.owner is None and not (one.pool != DEFAULT and self.held.get(one.pool, 0))
        self.blocks = [one for one in self.blocks if not one.gone]

    def snapshot(self, pool: tuple[int, int] | None = None, include_traces: bool = True) -> list[dict[str, Any]]:
        """A segment for each block; its address is the block's place in the order of their making."""
        return [
            {
                "address": one.number * 4096,
                "total_size": 4096,
                "segment_pool_id": one.pool,
                "blocks": [{"state": "inactive" if one.owner is None else "active_allocated"}],
            }
            for one in self.blocks
            if pool in (None, one.pool)
        ]

    # cuBLAS.

    def use(self) -> Block:
        """The workspace of a product of matrices, in this thread and on this stream."""
        if not self.caches:
            return self.allocate("one product")
        key = self.handle, self.stream
        if key not in self.kept:
            self.kept[key] = self.allocate("cuBLAS")
        return self.kept[key]

    def blas_handle(self) -> int:
        if self.caches:
            self.use()
        return self.handle

    def clear(self) -> None:
        """Do what a recording of CUDAGraph Trees does."""
        for one in self.kept.values():
            one.owner = None
        self.kept.clear()
        self.empty_cache()


def replaced_workspaces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspaces]:
    """Put the simulation in the place of PyTorch's. Autograd runs in a thread of its own."""
    made = Workspaces()

    autograd = ThreadPoolExecutor(1)

    def run_in_backward(device: int, do: Any) -> None:
        def work(stream: int = made.stream) -> None:
            with made.on(stream):
                do()

        made.given.append((made.stream, "writes", 0))
        autograd.submit(work).result(10)

    made.in_backward = run_in_backward  # type: ignore[attr-defined]
    for name, value in (
        ("begin_allocating", made.begin),
        ("end_allocating", made.end),
        ("release_pool", made.release),
        ("current_raw_stream", lambda index: made.stream),
    ):
        monkeypatch.setattr(torch_internals, name, value, raising=False)
    for name, function in (
        ("graph_pool_handle", made.new_pool),
        ("current_blas_handle", made.blas_handle),
        ("memory_snapshot", made.snapshot),
        ("device", lambda index: contextlib.nullcontext()),
        ("stream", made.on),
        ("current_stream", lambda index: made.stream_of(made.stream)),
        ("default_stream", lambda index: made.stream_of(0)),
        ("ExternalStream", lambda number, device: made.stream_of(number)),
        ("is_current_stream_capturing", lambda: made.stream in made.capturing),
        ("synchronize", lambda index: made.waits.append(index)),
    ):
        monkeypatch.setattr(torch.cuda, name, function)
    for module in (side_stream, recapture):
        monkeypatch.setattr(module, "own_stream", made.new_stream)
    monkeypatch.setattr(torch_internals.cudagraph_trees, "clear_cublass_cache", made.clear)
    monkeypatch.setattr(torch.cuda, "empty_cache", made.empty_cache)
    monkeypatch.setattr(recapture, "_apart", {})
    monkeypatch.setattr(pools, "_own", set())
    monkeypatch.setattr(side_stream, "_run_in_backward", run_in_backward)
    monkeypatch.setattr(side_stream, "_idle", type(side_stream._idle)(list))
    yield made
    autograd.shutdown()
