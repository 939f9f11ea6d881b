"""Tell whether a stream captures, for any stream, and whether PyTorch made it."""

from __future__ import annotations

import torch


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
