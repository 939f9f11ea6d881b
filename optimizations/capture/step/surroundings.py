"""What surrounds a call: settings that its operators depend on, and whether it is part of a step that runs already."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator

import torch


class _Inside(threading.local):
    """`step`: a step of this thread is being warmed up, observed or captured. What it calls is part of it."""

    step = False


inside = _Inside()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    inside.step = True
    try:
        yield
    finally:
        inside.step = False


def ambient() -> Hashable:
    """Settings outside of the step that its operators depend on."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )
