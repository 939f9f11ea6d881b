"""Whether a stream captures, asked of any stream, and whose stream it is."""

from __future__ import annotations

import torch


def is_capturing(stream: torch.cuda.Stream) -> bool:
    """Whether a capture is under way on a stream. To be asked before one stream waits for another.

    A stream that captures may not wait for what was not captured: the driver ends the capture. And a stream that waits
    for one that captures is drawn into the capture itself. That may be another thread's, on a stream that calls came on
    before.
    """
    with torch.cuda.stream(stream):
        return bool(torch.cuda.is_current_stream_capturing())


def is_pytorchs(stream: torch.cuda.Stream) -> bool:
    """Whether PyTorch made a stream, which it then keeps for ever. Others (`torch.cuda.ExternalStream`) may be
    destroyed at any time, and the driver must not be asked about them any more.

    The number of such a stream is its handle, which is even; PyTorch's own have odd numbers, and the default stream 0
    (c10/cuda/CUDAStream.cpp, "StreamId").
    """
    return stream.stream_id == 0 or stream.stream_id % 2 == 1
