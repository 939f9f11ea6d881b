"""`torch.compile(backend="encore")` sends graphs to Encore's maker exactly where indirection is on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from simulated_gpu.compiler import FakeMaker, program

import optimizations
from optimizations.graph.plan import Choice
from optimizations.options import Options
from optimizations.report.recordings import RecordingReport
from optimizations.trees import containers
from optimizations.trees import maker as maker_module


class FakeFunction:
    """`report.ReportedFunction` with one recording."""

    def __init__(self, recording: RecordingReport) -> None:
        self._recording = recording

    def recordings(self) -> list[RecordingReport]:
        return [self._recording]

    def kept(self) -> None:
        return None

    def uncaptured(self) -> list[Any]:
        return []

    def selection(self) -> None:
        return None

    def slow_calls(self) -> list[Any]:
        return []


class FakeEncore(FakeMaker):
    """Replace `EncoreMaker`: store its arguments and report one recording."""

    made_with: ClassVar[list[Any]] = []

    def __init__(self, options: Options, report: Callable[[Any], None]) -> None:
        super().__init__()
        self.made_with.append(options.indirection)
        report(FakeFunction(RecordingReport("inference", 3, 2, (), 0, 16, (), None)))


@pytest.fixture
def encore(cuda_in_disguise: FakeMaker, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMaker]:
    """Yield the replacement of stock's maker."""
    FakeEncore.made_with = []
    monkeypatch.setattr(maker_module, "EncoreMaker", FakeEncore)
    optimizations.reset()
    yield cuda_in_disguise
    optimizations.reset()


def call(options: Mapping[str, Any]) -> None:
    inductor = {"graph_partition": False, **options.get("inductor", {})}
    compiled = torch.compile(program, backend="encore", options={**options, "inductor": inductor})
    x = torch.ones(8, 8)
    assert torch.equal(compiled(x), program(x))


def test_indirection_off_uses_stock_graphs(encore: FakeMaker) -> None:
    assert Options().indirection == "auto", "what a user gets who says nothing"
    call({"indirection": "off"})
    assert FakeEncore.made_with == []
    assert encore.directions == ["inference"]


def test_reset_of_the_compiler_frees_graphs_and_keeps_reports(
    encore: FakeMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[str] = []
    monkeypatch.setattr(maker_module, "release_recordings", lambda: freed.append("recordings"))
    call({})
    assert freed == []
    torch.compiler.reset()
    assert freed == ["recordings"]
    assert len(optimizations.report()) == 1
    call({})
    monkeypatch.setattr(containers, "others_have_managers", lambda: True)
    torch.compiler.reset()
    assert freed == ["recordings"], "another thread may be in the middle of a replay"


@pytest.mark.parametrize("choice", ["auto", "host", "prelude"])
def test_indirection_on_uses_encores_graphs_and_reports(encore: FakeMaker, choice: str) -> None:
    call({"indirection": choice})
    assert FakeEncore.made_with == [Choice(choice)]
    assert encore.made == []
    (graph,) = optimizations.report()
    assert [recording.pointer_bytes for recording in graph.recordings] == [16]


@pytest.mark.parametrize(
    ("inductor", "stock_is_asked"), [({"triton.cudagraphs": False}, False), ({"triton.cudagraph_trees": False}, True)]
)
def test_disabled_cuda_graphs_use_stock(encore: FakeMaker, inductor: Mapping[str, Any], stock_is_asked: bool) -> None:
    call({"indirection": "auto", "inductor": inductor})
    assert FakeEncore.made_with == []
    assert bool(encore.made) == stock_is_asked


def test_reset_frees_all_memory(encore: FakeMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []
    monkeypatch.setattr(maker_module.containers, "free_all", lambda: freed.append("graphs"))
    monkeypatch.setattr(maker_module, "unload_kernels", lambda: freed.append("kernels"))
    call({"indirection": "auto"})
    assert optimizations.report()
    optimizations.reset()
    assert optimizations.report() == ()
    assert freed == ["graphs", "kernels"], "kernels last: graphs use them"
