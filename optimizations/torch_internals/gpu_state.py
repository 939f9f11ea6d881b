"""Query streams and the allocator of a GPU, where `torch.cuda` alone does not tell, or is not safe.

Note [References that are not counted]. PyTorch 2.11 drops a reference of each number it is asked with, of which it
counted none (pytorch #196366). The handle of a pool is such numbers. Where they are above 256, or below with a Python
before 3.12, they are freed while the pool's owner still has them: a process that had more than 256 pools crashes, at
the second or the third time that it asks about one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from typing import Any

import torch

from optimizations import torch_internals


def memory_segments(pool: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    """Return the segments of the allocator, or of one pool, as in `torch.cuda.memory_snapshot`, without history."""
    if drops_references():
        for number in (*(pool or (0, 0)), False):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    found: list[dict[str, Any]] = torch.cuda.memory_snapshot(pool, include_traces=False)
    return found


@functools.cache
def drops_references() -> bool:
    """Return whether this PyTorch drops references. See Note [References that are not counted]."""
    number = int("1000003")  # of no pool, and referenced nowhere else
    asked = number, number, False
    before = sys.getrefcount(number)
    with contextlib.suppress(RuntimeError):  # also where this PyTorch knows nothing of CUDA
        torch_internals.take_memory_snapshot(asked)
    if sys.getrefcount(number) == before:
        return False
    for one in asked:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
    return True


def is_capturing(stream: torch.cuda.Stream) -> bool:
    """Return whether a capture is under way on a stream. Check this before one stream waits for another.

    A stream that captures may not wait for what was not captured: the driver ends the capture. And a stream that waits
    for one that captures is drawn into the capture itself. That may be another thread's, on a stream that calls came on
    before.
    """
    with torch.cuda.stream(stream):
        return bool(torch.cuda.is_current_stream_capturing())


def is_pytorchs(stream: torch.cuda.Stream) -> bool:
    """Return whether PyTorch made a stream, and so keeps it for ever. Others (`torch.cuda.ExternalStream`) may be
    destroyed at any time, and must not be passed to the driver afterwards.

    The number of such a stream is its handle, which is even; PyTorch's own have odd numbers, and the default stream 0
    (c10/cuda/CUDAStream.cpp, "StreamId").
    """
    return stream.stream_id == 0 or stream.stream_id % 2 == 1
