"""Memory that placement keeps on the GPU is read and overwritten in order, whatever streams the calls come on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optimizations import torch_internals
from optimizations.placement import feeds


def test_what_is_overwritten_is_read_no_more_on_any_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    here = 1
    waits: list[tuple[int, int]] = []
    used: list[tuple[str, int]] = []

    def stream(number: int) -> Any:
        def wait_stream(other: Any) -> None:
            waits.append((number, other.cuda_stream))

        return SimpleNamespace(cuda_stream=number, wait_stream=wait_stream)

    kept: Any = SimpleNamespace(record_stream=lambda stream: used.append(("kept", stream.cuda_stream)))
    monkeypatch.setattr(torch_internals, "current_raw_stream", lambda index: here, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream(here))
    order = feeds._StreamOrder(torch.device("cuda", 0), lambda: [kept])
    order.overwrite()
    order.follow()
    order.overwrite()
    assert waits == [], "one stream keeps its own order"
    here = 2
    order.follow()
    assert (waits, used) == ([(2, 1)], [("kept", 2)])
    order.follow()
    assert len(waits) == 1
    order.overwrite()
    assert waits[1:] == [(2, 1)], "work may have come there since"
    here = 3
    order.follow()
    order.overwrite()
    assert waits[2:] == [(3, 2), (3, 1), (3, 2)]
