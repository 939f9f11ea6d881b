"""Streams that nobody else uses. PyTorch has 32 of a kind, and gives them to everybody in turn."""

from __future__ import annotations

import torch

from optimizations.graph.driver import check


def own_stream(device: int) -> torch.cuda.Stream:
    """A new stream of the device. It lasts as long as the process.

    Raises:
        CudaCallFailed: there is none.
    """
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # the driver needs a current context
        made = check(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
        return torch.cuda.ExternalStream(int(made), device=device)
