"""A clock that stands still by itself, so that no other work on the machine is in what is measured."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest


class Clock:
    """In the place of the `time` of a module; programs of tests let it go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.now_ns = 0
        monkeypatch.setattr(
            module, "time", SimpleNamespace(perf_counter_ns=lambda: self.now_ns, monotonic=lambda: self.now_ns / 1e9)
        )

    def pass_us(self, us: int) -> None:
        self.now_ns += 1000 * us
