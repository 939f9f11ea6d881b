"""Measure peak memory of PyTorch's CUDA allocator over a stretch of work."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from optimizations import torch_internals


@dataclass(frozen=True, slots=True)
class Peak:
    """Hold the largest numbers of bytes since `restart_peak`: allocated to tensors, and reserved from the driver."""

    allocated_bytes: int
    reserved_bytes: int


def release(device: torch.device) -> None:
    """Give unused memory back to the driver: neither other processes nor a CUDA graph's pool can use what is kept.

    Nothing to do on a CPU: looking for garbage walks over all that was imported, a quarter of a second each time.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def release_workspaces(device: torch.device) -> None:
    """Let go of the workspaces that cuBLAS keeps for each stream and thread, 32 MiB each on Hopper.

    Eager's reference runs on the default stream in each process. A mode that computes on another one has workspaces
    there, and eager's would count for its own. To be called while there is no CUDA graph, which may have the address of
    one.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch_internals.cudagraph_trees.clear_cublass_cache()


def restart_peak(device: torch.device) -> None:
    """Give unused memory back and count peaks again. Nothing to do on a CPU."""
    release(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> Peak | None:
    """Return the peaks since `restart_peak`; None on a CPU, whose memory PyTorch does not count."""
    if device.type != "cuda":
        return None
    return Peak(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))


def reserved_bytes(device: torch.device) -> int | None:
    """Return the bytes the process has reserved from the driver now; None on a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else None
