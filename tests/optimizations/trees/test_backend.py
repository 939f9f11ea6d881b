"""`torch.compile(backend="encore")` sends graphs to Encore's maker exactly where indirection is on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from simulated_gpu.compiler import CompiledOnCpu, FakeMaker, program

import optimizations
from optimizations import torch_internals
from optimizations.options import Options
from optimizations.trees import graphed_function as maker_module


class FakeEncore(FakeMaker):
    """Replace `EncoreMaker`, and note the option it is made with."""

    made_with: ClassVar[list[Any]] = []
    graphed: ClassVar[list[bool]] = []

    def __init__(self, options: Options, report: Callable[[Any], None]) -> None:
        super().__init__()
        self.made_with.append(options.indirection)

    def compiled(self, compiled_graph: Any, *, graphed: bool) -> None:
        assert isinstance(compiled_graph, torch_internals.CompiledFxGraph)
        self.graphed.append(graphed)


@pytest.fixture
def encore(cuda_in_disguise: FakeMaker, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMaker]:
    """Yield the replacement of stock's maker."""
    FakeEncore.made_with, FakeEncore.graphed = [], []
    monkeypatch.setattr(maker_module, "EncoreMaker", FakeEncore)
    optimizations.reset()
    yield cuda_in_disguise
    optimizations.reset()


def call(options: Mapping[str, Any]) -> None:
    inductor = {"graph_partition": False, **options.get("inductor", {})}
    compiled = torch.compile(program, backend="encore", options={**options, "inductor": inductor})
    x = torch.ones(8, 8)
    assert torch.equal(compiled(x), program(x))


@pytest.mark.parametrize(
    ("options", "made_with", "directions"),
    [
        ({}, ["auto"], []),
        ({"indirection": "host"}, ["host"], []),
        ({"indirection": "prelude"}, ["prelude"], []),
        ({"indirection": "off"}, [], ["inference"]),
        ({"inductor": {"triton.cudagraph_trees": False}}, [], ["inference"]),
        ({"inductor": {"triton.cudagraphs": False}}, [], []),
    ],
)
def test_options_choose_encores_or_stocks_graphs(
    encore: FakeMaker, options: Mapping[str, Any], made_with: list[str], directions: list[str]
) -> None:
    call(options)
    assert (FakeEncore.made_with, encore.directions) == (made_with, directions)


def test_maker_receives_functions_compiled_without_graphs(encore: FakeMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = iter((None, "a reason of Inductor's"))
    utils = torch_internals.cudagraph_utils
    monkeypatch.setattr(utils, "check_lowering_disable_cudagraph", lambda mapping: next(reasons))
    run = torch.compile(program, backend="encore", options={"inductor": {"graph_partition": False}})
    run(torch.ones(8, 8, requires_grad=True)).sum().backward()
    assert FakeEncore.graphed == [True, False]


def test_backward_without_operators_ends_an_iteration(compiled_on_cpu: CompiledOnCpu) -> None:
    """Inductor does not compile it. The previous result is live when the next call begins."""
    run = torch.compile(lambda x: x + 1, backend="encore")
    for _ in range(8):
        x = torch.ones(3, requires_grad=True)
        y = run(x)
        y.backward(torch.ones(3))
        assert torch.equal(x.grad + 1, y)
    assert compiled_on_cpu.captures == [2]


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


def test_reset_frees_all_memory(encore: FakeMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []
    monkeypatch.setattr(maker_module.containers, "free_all", lambda: freed.append("graphs"))
    monkeypatch.setattr(maker_module, "unload_kernels", lambda: freed.append("kernels"))
    call({"indirection": "auto"})
    assert optimizations.report()
    optimizations.reset()
    assert optimizations.report() == ()
    assert freed == ["graphs", "kernels"], "kernels last: graphs use them"
