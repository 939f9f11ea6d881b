"""A clock that only the test advances, so that other work on the machine does not count."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest


class Clock:
    """Replaces `time` of a module. Programs of tests advance it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.now_ns = 0
        monkeypatch.setattr(
            module, "time", SimpleNamespace(perf_counter_ns=lambda: self.now_ns, monotonic=lambda: self.now_ns / 1e9)
        )

    def pass_us(self, us: int) -> None:
        self.now_ns += 1000 * us
