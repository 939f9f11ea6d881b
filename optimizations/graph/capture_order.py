"""In which order a capture and the work of its caller come, on the GPU.

Note [Where random numbers begin]. A graph reads from memory where its random numbers begin, and all graphs of a
generator read the same. PyTorch 2.11 writes there before each replay, on the stream of the replay, and also before each
capture, on the stream of the capture. Nothing orders these writes. If the GPU is busy, that of a capture may come after
that of the next replay, which then draws the numbers of a call long ago; or before a replay that is under way has read.
The graphs of `torch.cuda.graph`, and of CUDAGraph Trees, have this in common.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from optimizations.torch_internals.capturing import is_capturing


@contextlib.contextmanager
def in_order(stream: torch.cuda.Stream) -> Iterator[None]:
    """Let what a capture on `stream`, made in the block, enqueues there come after what was enqueued on the current
    stream, and before what is enqueued on it next. Note [Where random numbers begin].

    Where the capture fails, and is still under way on `stream`, nothing waits for it.
    """
    outside = torch.cuda.current_stream(stream.device)
    stream.wait_stream(outside)
    try:
        yield
    finally:
        if not is_capturing(stream):
            outside.wait_stream(stream)
