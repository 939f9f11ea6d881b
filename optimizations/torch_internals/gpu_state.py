"""Query streams, generators and the allocator of a GPU where `torch.cuda` is insufficient or unsafe.

Note [References that are not counted]. When PyTorch 2.11 is queried for a pool, it drops an uncounted reference to each
integer of the pool's handle (pytorch #196366). Integers above 256, and all integers before Python 3.12, are freed while
the pool's owner still has them: a process that had more than 256 pools crashes at the second or third such query. So
references are added, on any version: what is lost is that the integers of a handle are never freed.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def memory_segments(pool: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    """Return the segments of the allocator, or of one pool, as in `torch.cuda.memory_snapshot`, without history."""
    for number in (*(pool or (0, 0)), False):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    found: list[dict[str, Any]] = torch.cuda.memory_snapshot(pool, include_traces=False)
    return found


def is_capturing(stream: torch.cuda.Stream) -> bool:
    """Return whether a stream is being captured. Check this before one stream waits for another.

    A stream under capture must not wait for uncaptured work: the driver would invalidate the capture. And a stream that
    waits for one under capture joins that capture, which may be another thread's.
    """
    with torch.cuda.stream(stream):
        return bool(torch.cuda.is_current_stream_capturing())


def is_pytorchs(stream: torch.cuda.Stream) -> bool:
    """Return whether PyTorch made a stream, which it never destroys. Others (`torch.cuda.ExternalStream`) may be
    destroyed at any time, and must not be passed to the driver afterwards.

    The number of such a stream is its handle, which is even; PyTorch's own have odd numbers, and the default stream 0
    (c10/cuda/CUDAStream.cpp, "StreamId").
    """
    return stream.stream_id == 0 or stream.stream_id % 2 == 1
