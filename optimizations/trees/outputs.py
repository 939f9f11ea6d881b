"""What a replay can hand out: CUDAGraph Trees keep of an output where it lies, its dtype and its geometry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from optimizations.lazy_view import is_lazy_view


class NotReplayable(RuntimeError):
    """An output is more than its memory, and what a replay hands out would be another tensor."""


def require_replayable(outputs: Sequence[Any]) -> None:
    """To be asked of what was captured.

    Raises:
        NotReplayable: an output is a lazy conjugate or negative, or is quantized; the message says which.
    """
    for place, output in enumerate(outputs):
        if not isinstance(output, torch.Tensor):
            continue
        if is_lazy_view(output):
            raise NotReplayable(
                f"result {place} is a lazy conjugate or negative, of which a graph keeps only the memory"
            )
        if output.is_quantized:
            raise NotReplayable(f"result {place} is quantized, and a graph keeps no scales")
