"""Whether a stream captures, asked of any stream."""

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
