"""Operators and sizes that are left out of CUDA graphs: Encore leaves out what stock does, and records why."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_gpu.compiler import INDUCTOR, CompiledOnCpu

import optimizations
from optimizations import torch_internals
from optimizations.report import CompiledGraph, LeftOut
from optimizations.stack_trace import reason_and_frame
from optimizations.torch_internals.outcome import FORWARD_NOT_CAPTURED, NO_CUDA_WORK, SWITCHED_OFF, watched

CALLS: list[torch.Size] = []


@torch.library.custom_op("skipped_graphs::counted", mutates_args=(), tags=(torch._C.Tag.cudagraph_unsafe,))
def counted(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(x.shape)
    return x + 1


@counted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Collect what Inductor and Encore log with `TORCH_LOGS=cudagraphs`."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = torch_internals.cudagraph_utils.cudagraphs_log, Handler()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield found
    logger.setLevel(before)
    logger.removeHandler(handler)


def around(x: torch.Tensor) -> torch.Tensor:
    return counted(x * 2) * 3


def masked(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[x > 1] = 0
    return y + 1


@pytest.fixture
def world(compiled_on_cpu: CompiledOnCpu, monkeypatch: pytest.MonkeyPatch) -> CompiledOnCpu:
    """Whatever is compiled is reported as for a GPU."""
    init = torch_internals.CompiledFxGraph.__init__

    def on_a_gpu(graph: Any, *arguments: Any, **keywords: Any) -> None:
        init(graph, *arguments, **keywords)
        graph.device_types.add("cuda")

    monkeypatch.setattr(torch_internals.CompiledFxGraph, "__init__", on_a_gpu)
    return compiled_on_cpu


def stock_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor cuts where it does on a GPU; it takes nodes on the CPU for nodes on one."""
    scheduler, _ = torch_internals.holder_of("graph_partition")
    monkeypatch.setattr(sys.modules[scheduler.__module__].BaseSchedulerNode, "is_gpu", lambda node: True)
    monkeypatch.setitem(INDUCTOR, "graph_partition", True)


def decomposed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    left, values, right = torch.linalg.svd(x * 2)
    return (left * values) @ right + 1, values * 3


def eigenvalues(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.linalg.eigh(x @ x.mT).eigenvalues.exp().sum() * x.cos(),)


def eigenvalues_alone(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.linalg.eigvalsh(x @ x.mT).sum().tanh() * x.cos(),)


@pytest.mark.parametrize(
    ("program", "reason", "trained"),
    [
        (around, "CUDAGraph-unsafe custom ops", False),
        (decomposed, "custom partition op: aten::_linalg_svd.default", False),
        (eigenvalues, "custom partition op: aten::_linalg_eigh.default", False),
        (eigenvalues, "custom partition op: aten::_linalg_eigh.default", True),
        (eigenvalues_alone, "custom partition op: aten::_linalg_eigh.default", False),
    ],
)
def test_operator_runs_between_graphs(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    program: Callable[[torch.Tensor], Any],
    reason: str,
    trained: bool,
) -> None:
    """The capture of a factorization would fail. What takes its results out of a tuple is not captured either."""
    stock_partitions(monkeypatch)
    monkeypatch.setitem(INDUCTOR, "custom_should_partition_ops", ["aten::tan"])
    world: CompiledOnCpu = request.getfixturevalue("world")
    call = torch.compile(program, backend="encore", options={"selection": "off"})
    CALLS.clear()
    for step in range(12):
        torch.compiler.cudagraph_mark_step_begin()
        x = (torch.arange(16.0).reshape(4, 4) / (8 + step)).sin().requires_grad_(trained)
        torch.testing.assert_close(call(x), program(x))
        if trained:
            torch.testing.assert_close(*(torch.autograd.grad(run(x)[0].sum(), x) for run in (call, program)))
    assert len(CALLS) == (24 if program is around else 0), "the operator is called in each call, and in none more"
    (report,) = optimizations.report()
    assert [(one.reason, one.count) for graph in report.compiled for one in graph.left_out] == [(reason, 1)]
    assert not report.uncaptured
    assert len(world.functions) == (3 if trained else 2)
    assert all(one.captures for one in world.functions) and world.cuda.replays >= 16


def test_factorization_is_never_captured(compiled_on_cpu: CompiledOnCpu) -> None:
    """Without partitions the function that calls it has no graph."""
    call = torch.compile(decomposed, backend="encore", options={"selection": "off"})
    for step in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        x = (torch.arange(16.0).reshape(4, 4) / (8 + step)).sin()
        torch.testing.assert_close(call(x), decomposed(x))
    assert [one.captures for one in compiled_on_cpu.functions] == [0]
    (report,) = optimizations.report()
    (uncaptured,) = report.uncaptured
    assert uncaptured.reason == "it calls aten::_linalg_svd, which cannot be captured"


@pytest.mark.parametrize("program", [around, masked])
def test_unsafe_operator_leaves_program_without_graph(
    world: CompiledOnCpu, program: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Without partitions there is no graph at all, as in stock PyTorch."""
    call = torch.compile(program, backend="encore")
    for step in range(4):
        x = torch.arange(4.0) + step
        torch.testing.assert_close(call(x), program(x))
    assert world.functions == []
    (report,) = optimizations.report()
    reasons = [one.reason for graph in report.compiled for one in graph.not_captured]
    assert len(reasons) == 1
    assert "incompatible op" in reasons[0]


def test_dynamic_sizes_are_skipped_by_the_option(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INDUCTOR, "triton.cudagraph_skip_dynamic_graphs", True)
    world: CompiledOnCpu = request.getfixturevalue("world")
    call = torch.compile(lambda x: (x * 2).sin(), backend="encore", dynamic=True)
    for size in range(3, 9):
        x = torch.arange(float(size))
        torch.testing.assert_close(call(x), (x * 2).sin())
    assert world.functions == []
    (report,) = optimizations.report()
    reasons = [one.reason for graph in report.compiled for one in graph.not_captured]
    assert any("cudagraph_skip_dynamic_graphs=True" in one for one in reasons)


@pytest.mark.parametrize(("limit", "warned"), [(2, 1), (8, 0), (None, 0)])
def test_many_sizes_warn_once(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    logged: list[str],
    limit: int | None,
    warned: int,
) -> None:
    monkeypatch.setitem(INDUCTOR, "triton.cudagraph_dynamic_shape_warn_limit", limit)
    world: CompiledOnCpu = request.getfixturevalue("world")
    call = torch.compile(lambda x: (x * 2).sin(), backend="encore", dynamic=True, options={"selection": "off"})
    for step in range(20):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.arange(float(3 + step % 5))
        torch.testing.assert_close(call(x), (x * 2).sin())
    assert world.cuda.replays >= 5
    said = [one for one in logged if "distinct sizes" in one]
    assert len(said) == warned
    assert all("We have observed 3 distinct sizes" in one for one in said)


def test_reasons_without_graph_are_logged_once(compiled_on_cpu: CompiledOnCpu, logged: list[str]) -> None:
    call = torch.compile(lambda x: (x * 2).conj(), backend="encore", options={"selection": "off"})
    for step in range(5):
        call(torch.randn(3, dtype=torch.complex64) + step)
    said = [one for one in logged if "lazy conjugate" in one]
    assert len(said) == 1
    assert said[0].startswith("skipping cudagraphs due to ")
    (report,) = optimizations.report()
    assert report.uncaptured[0].calls > 1


# Outcomes of compiled graphs are recorded per thread, and PyTorch's class is unchanged.


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PyTorch's method, doing nothing."""
    owner, attribute = torch_internals.holder_of("post_compile")

    def post_compile(graph: Any, inputs: Any, constants: Any, settings: Any) -> str:
        return "done"

    monkeypatch.setattr(owner, attribute, post_compile)
    return post_compile


def _present() -> Any:
    owner, attribute = torch_internals.holder_of("post_compile")
    return vars(owner)[attribute]


def _compile(graph: Any, *, enabled: bool = False) -> Any:
    return _present()(graph, [], None, {"cudagraphs": enabled})


def _graph(name: str) -> Any:
    return SimpleNamespace(
        fx_kwargs={"is_inference": name == "inference"},
        disabled_cudagraphs_reason=name,
        cudagraph_info=None,
        device_types={"cuda"},
        partition_maps=(),
    )


def test_innermost_block_of_a_thread_gets_records(stock: Any) -> None:
    outer: list[tuple[CompiledGraph, Any]] = []
    inner: list[tuple[CompiledGraph, Any]] = []
    graphs = [_graph("inference"), _graph("forward")]
    with watched(lambda *found: outer.append(found)):
        with watched(lambda *found: inner.append(found)):
            _compile(graphs[0])
        _compile(graphs[1])
        other = threading.Thread(target=lambda: _compile(_graph("elsewhere")))
        other.start()
        other.join(10)
    for found, direction, graph in zip((inner, outer), ("inference", "forward"), graphs, strict=True):
        assert [(record.direction, of) for record, of in found] == [(direction, graph)]
    assert _present() is stock


FRAME = 'File "/x/site-packages/mine/net.py", line 12, in forward\n    y = x + self.table\n'
LINE = "/x/site-packages/mine/net.py:12 in forward: y = x + self.table"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (f"skipping cudagraphs due to cpu device (arg3_1). Found from : \n {FRAME}", ("cpu device (arg3_1)", LINE)),
        (f"disabling cudagraphs due to incompatible op aten.x Found from {FRAME}\n",
         ("disabling cudagraphs due to incompatible op aten.x", LINE)),
        ("skipping cudagraphs due to multiple devices: cpu, cuda:0", ("multiple devices: cpu, cuda:0", None)),
        ("complex memory overlap", ("complex memory overlap", None)),
    ],
)  # fmt: skip
def test_messages_of_inductor_are_parsed(message: str, expected: tuple[str, str | None]) -> None:
    reason, frame = reason_and_frame(message)
    assert (reason, None if frame is None else str(frame)) == expected


class Settings(dict[str, Any]):
    """Provide the argument of `post_compile`: `cudagraphs` is read before and after it."""

    def __init__(self, *answers: bool) -> None:
        super().__init__()
        self._answers = list(answers)

    def __getitem__(self, name: str) -> bool:
        assert name == "cudagraphs"
        return self._answers.pop(0)


def noted(
    *, wanted: bool, enabled: bool, backward: bool = False, asked_for: bool = True, **fields: Any
) -> CompiledGraph:
    """The record of a `CompiledFxGraph` with these fields; without any it is captured whole."""
    graph = _graph("")
    for name, value in {"partition_maps": None, "fx_kwargs": {"is_backward": backward}, **fields}.items():
        setattr(graph, name, value)
    found: list[CompiledGraph] = []
    settings = torch_internals.inductor_config.patch({"triton.cudagraphs": asked_for})
    with settings, watched(lambda record, _: found.append(record), every_thread=True):
        _present()(graph, [], None, Settings(wanted, enabled))
    (record,) = found
    return record


def test_each_kind_of_uncaptured_graph_has_a_reason(stock: Any) -> None:
    overlapping = SimpleNamespace(cudagraph_fail_reasons=["complex memory overlap"] * 2)
    cpu_device = f"skipping cudagraphs due to cpu device (a). Found from : \n {FRAME}"
    for fields, expected in [
        ({"wanted": False, "device_types": {"cpu"}}, (LeftOut(NO_CUDA_WORK, None),)),
        ({"wanted": False, "disabled_cudagraphs_reason": cpu_device}, (LeftOut("cpu device (a)", LINE),)),
        ({"wanted": True, "cudagraph_info": overlapping}, (LeftOut("complex memory overlap", None),)),
        ({"wanted": False, "backward": True}, (LeftOut(FORWARD_NOT_CAPTURED, None),)),
        ({"wanted": True, "partition_maps": []}, ()),  # all of it left out, told node by node
    ]:
        record = noted(enabled=False, **fields)
        assert (record.partitions, record.not_captured) == (0, expected)
    assert noted(wanted=False, enabled=False, asked_for=False).not_captured == (LeftOut(SWITCHED_OFF, None),)
