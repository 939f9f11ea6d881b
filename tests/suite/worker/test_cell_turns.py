"""Locks of processes that tune while others call."""

from __future__ import annotations

import threading
import time

import torch

import suite.worker.gpu_turns
from suite.worker.gpu_turns import GpuTurns, alone_to_tune


def test_tuning_rank_does_not_wait_for_a_waiting_one(monkeypatch, tmp_path):
    """Two modes of two ranks. Each rank has a GPU with turns of its own; a collective needs both ranks of a mode."""
    monkeypatch.setattr(suite.worker.gpu_turns, "MOST_WAIT_S", 10.0)
    pending = threading.local()

    def synchronize() -> None:
        if hasattr(pending, "work"):
            pending.work.wait()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    class Collective:
        def __init__(self) -> None:
            self._launched, self._whole, self._lock = 0, threading.Event(), threading.Lock()

        def launch(self) -> None:
            pending.work = self._whole
            with self._lock:
                self._launched += 1
                if self._launched == 2:
                    self._whole.set()

    def rank(number: int, collective: Collective, is_behind: bool) -> None:
        """A late rank tunes one more kernel before the collective, which the other found tuned."""
        turns = GpuTurns(tmp_path / f"turns-{number}")

        def tune() -> None:
            with alone_to_tune(turns, "cuda"):
                time.sleep(0.05)
                torch.cuda.synchronize()  # as who times a kernel does

        if is_behind:
            time.sleep(0.3)
            tune()
        collective.launch()
        tune()

    first, second = Collective(), Collective()
    ranks = [
        threading.Thread(target=rank, args=arguments, daemon=True)
        for arguments in [(0, first, False), (1, first, True), (0, second, True), (1, second, False)]
    ]
    begin = time.monotonic()
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(20.0)
    assert time.monotonic() - begin < 5.0
