"""Memory that placement keeps on the GPU is read and overwritten in order on any streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_gpu.allocator import EXTERNAL, stream_id

from optimizations import torch_internals
from optimizations.placement import feeds


class Streams:
    """Streams by number. `waits`: the first was told to wait for the second."""

    def __init__(self) -> None:
        self.here = 1
        self.capturing: set[int] = set()
        self.waits: list[tuple[int, int]] = []

    def stream(self, number: int) -> Any:
        def wait_stream(other: Any) -> None:
            self.waits.append((number, other.cuda_stream))

        return SimpleNamespace(cuda_stream=number, stream_id=stream_id(number), wait_stream=wait_stream)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch_internals, "current_raw_stream", lambda index: made.here, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.stream(made.here))
    monkeypatch.setattr(feeds, "is_capturing", lambda stream: stream.cuda_stream in made.capturing)
    return made


def test_overwritten_memory_has_no_reader_on_any_stream(streams: Streams) -> None:
    used: list[tuple[str, int]] = []
    kept: Any = SimpleNamespace(record_stream=lambda stream: used.append(("kept", stream.cuda_stream)))
    order = feeds._StreamOrder(torch.device("cuda", 0), lambda: [kept])
    order.overwrite()
    order.follow()
    order.overwrite()
    assert streams.waits == [], "one stream keeps its own order"
    streams.here = 2
    order.follow()
    assert (streams.waits, used) == ([(2, 1)], [("kept", 2)])
    order.follow()
    assert len(streams.waits) == 1
    order.overwrite()
    assert streams.waits[1:] == [(2, 1)], "work may have come there since"
    streams.here = 3
    order.follow()
    order.overwrite()
    assert streams.waits[2:] == [(3, 2), (3, 1), (3, 2)]


def test_possibly_destroyed_stream_is_awaited_once(streams: Streams) -> None:
    order = feeds._StreamOrder(torch.device("cuda", 0), list)
    order.follow()
    streams.here = EXTERNAL
    order.follow()
    streams.here = 2
    order.follow()
    assert streams.waits == [(EXTERNAL, 1), (2, EXTERNAL)]
    order.overwrite()
    assert streams.waits[2:] == [(2, 1)]


def test_capture_of_a_step_waits_for_no_outside_stream(streams: Streams) -> None:
    order = feeds._StreamOrder(torch.device("cuda", 0), list)
    order.follow()
    streams.here, streams.capturing = 7, {7}
    order.follow()
    order.overwrite()
    assert streams.waits == []
    streams.here, streams.capturing = 2, set()
    order.follow()
    order.overwrite()
    assert streams.waits == [(2, 1), (2, 1)], "of what was captured nothing ran"


def test_nothing_waits_for_a_stream_another_thread_captures_on(streams: Streams) -> None:
    order = feeds._StreamOrder(torch.device("cuda", 0), list)
    for streams.here in (1, 2, 3):
        order.follow()
    streams.waits.clear()
    streams.capturing = {2}
    order.overwrite()
    assert streams.waits == [(3, 1)]
    streams.here, streams.capturing = 1, {3}
    order.follow()
    order.overwrite()
    assert streams.waits == [(3, 1), (1, 2)]
