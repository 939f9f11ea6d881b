"""Second captures where the memory that an input was recorded in went back to the device."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_gpu.driver import word
from synthetic_captures import kernel

from optimizations.graph.pointers import UseKind
from optimizations.graph.recapture import Recaptured
from optimizations.graph.records import CapturedGraph, MemoryRange
from optimizations.in_place import examination
from optimizations.in_place.examination import Examination

GONE = RuntimeError("CUDA driver error: invalid argument")
"""What a launcher raises that asks the driver about memory which is not there."""


class Recordings:
    """A function of one input, whose kernel has a word that is another one in each capture."""

    def __init__(self, *, is_there: bool) -> None:
        self.input = torch.zeros(256)
        self.recorded_at = self.input.data_ptr()
        self.is_there = is_there
        self.captured_at: list[int] = []

    def graph(self, address: int) -> CapturedGraph:
        self.captured_at.append(address)
        return CapturedGraph(nodes=(kernel([word(address), word(7 * len(self.captured_at))]),), edges=())

    def capture(self, inputs: Sequence[Any]) -> Recaptured:
        (given,) = inputs
        if given.address == self.recorded_at and not self.is_there:
            raise GONE
        return Recaptured(self.graph(given.address), ())


@pytest.mark.parametrize("is_there", [True, False])
def test_no_capture_is_made_where_the_memory_of_an_input_is_gone(
    is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Recordings(is_there=is_there)
    monkeypatch.setattr(examination, "pool_memory", lambda pool: ())
    monkeypatch.setattr(examination, "are_allocated", lambda memory: [is_there for _ in memory])
    host = SimpleNamespace(at_address=lambda index, address: SimpleNamespace(address=address))
    tools = SimpleNamespace(device=torch.device("cpu"), replace_address=None)
    one = Examination(
        SimpleNamespace(inputs=[made.input], pool=(0, 1), seconds=1e9),  # type: ignore[arg-type]
        host,  # type: ignore[arg-type]
        lambda: None,  # type: ignore[arg-type, return-value]
        made.capture,
        lambda: tools,  # type: ignore[arg-type, return-value]
        lambda: True,
    )
    candidates = {0: MemoryRange(address=made.recorded_at, size_bytes=1024)}
    analysis = one._analysis(made.graph(made.recorded_at), candidates)
    (verdict,) = analysis.verdicts
    assert [use.kind for use in verdict.uses] == [UseKind.PARAMETER]
    assert len(made.captured_at) > 2, "there was a doubt"
    assert (made.captured_at.count(made.recorded_at) > 1) is is_there
