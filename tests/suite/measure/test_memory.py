"""Peaks of memory."""

from __future__ import annotations

import torch


def test_peaks_count_from_their_restart(monkeypatch):
    """Compiling needs far more than replaying; without a restart the larger peak would stand for both."""
    from suite.measure import memory

    allocator = {"now": 100, "peak": 100}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device=None: allocator.update(peak=allocator["now"])
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: allocator["peak"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device=None: 2 * allocator["peak"])
    device = torch.device("cuda")
    allocator["peak"] = 5000
    memory.restart_peak(device)
    allocator["peak"] = 300
    assert memory.peak(device) == (300, 600)
    allocator["peak"] = 5000
    memory.restart_peak(device)
    assert memory.peak(device) == (100, 200)
