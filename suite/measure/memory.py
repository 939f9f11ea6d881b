"""Measure peak memory of PyTorch's CUDA allocator over a stretch of work."""

from __future__ import annotations

import gc
from typing import NamedTuple

import torch

from optimizations import torch_internals


class Peak(NamedTuple):
    """Hold the largest numbers of bytes since `restart_peak`: allocated to tensors, and reserved from the driver."""

    allocated_bytes: int
    reserved_bytes: int


def release(device: torch.device) -> None:
    """Return unused memory to the driver: neither other processes nor a CUDA graph's pool can use cached memory.

    Do nothing on a CPU, because a garbage collection over all imported objects takes a quarter of a second.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def release_workspaces(device: torch.device) -> None:
    """Free the workspaces that cuBLAS caches for each stream and thread, 32 MiB each on Hopper.

    Eager's reference runs on the default stream in each process. A mode that computes on another stream has workspaces
    there, and eager's would be counted as its memory. Call this only while no CUDA graph exists, because a graph may
    contain the address of a workspace.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch_internals.cudagraph_trees.clear_cublass_cache()


def restart_peak(device: torch.device) -> None:
    """Return unused memory to the driver and reset peaks. Do nothing on a CPU."""
    release(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> Peak | None:
    """Return the peaks since `restart_peak`; None on a CPU, whose memory PyTorch does not count."""
    if device.type != "cuda":
        return None
    return Peak(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
