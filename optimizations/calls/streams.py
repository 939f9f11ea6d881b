"""Contexts and streams of the threads that replay."""

from __future__ import annotations

import torch

from optimizations.graph.driver import check
from optimizations.torch_internals.capturing import is_capturing


def make_context_current(device_index: int) -> None:
    """Give this thread the device's context if it has none: calls of the driver need one, and PyTorch sets it late.

    Raises:
        CudaCallFailed: the driver refuses.
    """
    try:
        from cuda.bindings import driver
    except ImportError:  # then there are no driver calls either
        return
    if int(check(driver.cuCtxGetCurrent)):
        return
    with torch.cuda.device(device_index):
        device = check(driver.cuDeviceGet, device_index)
        check(driver.cuCtxSetCurrent, check(driver.cuDevicePrimaryCtxRetain, device))


def wait_for_stream(raw_stream: int, device_index: int) -> None:
    """Let the current stream of the device wait for everything that is enqueued on another, by its handle.

    Not where one of them captures: see `is_capturing`.
    """
    current, other = torch.cuda.current_stream(device_index), stream_of(raw_stream, device_index)
    if not is_capturing(current) and not is_capturing(other):
        current.wait_stream(other)


def stream_of(raw_stream: int, device_index: int) -> torch.cuda.Stream:
    """The stream of the device with this handle."""
    if raw_stream:
        return torch.cuda.ExternalStream(raw_stream, device=device_index)
    return torch.cuda.default_stream(device_index)
