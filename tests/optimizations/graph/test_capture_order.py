"""Streams of captures and of their callers wait for each other."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from simulated_gpu.runtime import FakeStream

from optimizations.graph.pools import in_order


class Stream(FakeStream):
    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__()
        self._name, self._events = name, events

    def wait_stream(self, other: Any) -> None:
        self._events.append(f"{self._name} waits for {other._name}")


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> Any:
    caller = Stream("the caller", events)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Stream("the side", events)


def test_capture_runs_between_earlier_and_later_work(side: Any, events: list[str]) -> None:
    with in_order(side):
        events.append("a capture")
    assert events == ["the side waits for the caller", "a capture", "the caller waits for the side"]


@pytest.mark.parametrize("capturing", [False, True])
def test_nothing_waits_for_a_failed_capture_under_way(
    side: Any, events: list[str], capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's stream would join that capture."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    with pytest.raises(KeyError), in_order(side):
        raise KeyError
    assert events[1:] == ([] if capturing else ["the caller waits for the side"])
