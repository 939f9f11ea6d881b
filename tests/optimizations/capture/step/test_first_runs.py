"""Work of the first run only, and answers to capture queries, do not refuse later calls."""

from __future__ import annotations

import array
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import batches, loss_of, network
from torch import nn

from optimizations.capture.callables.graph_callables import GraphedCallables
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.observer import StepRefused
from optimizations.capture.step.user_code import TUNERS

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def training(model: nn.Module, forward: Callable[..., torch.Tensor], optimizer: Any = None) -> Callable[..., Any]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)

    def step(*batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def run(step: Any, calls: list[tuple[Any, ...]], between: Callable[[int], None] = lambda index: None) -> Any:
    torch.manual_seed(5)
    found = []
    for index, call in enumerate(calls):
        found.append(step(*call))
        between(index)
    return found


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [tensor.item() for tensor in found] == [tensor.item() for tensor in expected]


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("asks", [True, False])
def test_failed_capture_of_a_querying_step_is_tried_again(asks: bool) -> None:
    """As code does that leaves something to libraries which a capture breaks, and that passes no operator."""
    model, told = network("cpu"), array.array("b")  # where no code looks for state

    def forward(batch: Any) -> torch.Tensor:
        if asks:
            told.append(torch.cuda.is_current_stream_capturing())
        return loss_of(model, batch)

    device = CpuDevice()
    device.fail_with = RuntimeError("operation not permitted when stream is capturing")
    step = GraphedStep(training(model, forward), device=device)
    run(step, batches("cpu", 8))
    assert len(step.report().refusals) == (not asks)
    assert step.report().replays == (3 if asks else 0)
    if asks:
        assert list(told) == [False] * 4 + [True] * 3


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("first", [True, False])
def test_step_refused_before_its_capture_query_equals_eager(first: bool) -> None:
    """No answer would make it a graph. One that is refused for what it does unless it is captured is told so."""

    def forward(batch: Any) -> torch.Tensor:
        if first and batch["x"].sum().item() > 1e9:
            return batch["x"].sum()
        if torch.cuda.is_current_stream_capturing():
            batch = {**batch, "x": batch["x"] * 1.001}
        elif batch["x"].sum().item() > 1e9:
            return batch["x"].sum()
        return loss_of(model, batch)

    model = network("cpu")
    expected = run(training(model, forward), batches("cpu", 8))
    model = network("cpu")
    step = GraphedStep(training(model, forward), device=CpuDevice())
    found = run(step, batches("cpu", 8))
    assert len(step.report().refusals) == first
    if first:
        assert_equal(found, expected)
    else:
        assert step.report().replays > 0 and found[-1].item() != expected[-1].item()


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_step_refused_all_the_same_is_told_of_two_captures() -> None:
    """It may compute different numbers while queries for a capture return True."""
    model, told = network("cpu"), array.array("b")

    def forward(batch: Any) -> torch.Tensor:
        told.append(torch.cuda.is_current_stream_capturing())
        batch["x"].sum().item()
        return loss_of(model, batch)

    step = GraphedStep(training(model, forward), device=CpuDevice())
    run(step, batches("cpu", 10))
    assert sum(told) == 2
    assert step.report().replays == 0


def test_capture_query_answers_true_where_else_refused() -> None:
    def reads_unless_captured(x: torch.Tensor) -> torch.Tensor:
        if not torch.cuda.is_current_stream_capturing() and x.sum().item() > 1e9:
            return x
        return x * 2

    (graphed,) = GraphedCallables(reads_unless_captured, [(torch.ones(3, requires_grad=True),)], device=CpuDevice())
    x = torch.arange(3.0, requires_grad=True)
    assert torch.equal(graphed(x), x * 2)


class Captured:
    """A stream that is captured."""

    def is_capturing(self) -> bool:
        return True


@pytest.mark.parametrize("query", ["cuda.is_current_stream_capturing()", "accelerator.current_stream().is_capturing()"])
def test_optimizer_capture_query_answers_false(monkeypatch: pytest.MonkeyPatch, query: str) -> None:
    """It would refuse a capture with `fused=True`. What it counts on the host is seen by the observer.

    The second query is that of PyTorch 2.14's optimizers.
    """
    monkeypatch.setattr(torch.accelerator, "current_stream", Captured)
    told, asked = array.array("b"), array.array("b")  # containers of C, whose changes are not the step's

    class Asking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            told.append(torch.cuda.is_current_stream_capturing())
            _asks(asked, query)()
            return super().step(closure)

    model = network("cpu")
    optimizer = Asking(model.parameters(), lr=0.1)
    step = GraphedStep(training(model, lambda batch: loss_of(model, batch), optimizer), device=CpuDevice())
    run(step, batches("cpu", 5))
    assert step.report().replays == 2
    assert list(told) == [False] * 4
    assert list(asked)[1:] == [False] * 3, "but for the first call, which is not observed"


def _asks(answers: array.array[int], query: str) -> Any:
    """A function that lies in PyTorch's optimizers."""
    scope: dict[str, Any] = {"torch": torch, "answers": answers}
    path = str(Path(torch.optim.__file__).parent / "optimizer.py")
    source = f"def ask():\n    answers.append(torch.{query})\n"
    exec(compile(source, path, "exec"), scope)  # noqa: S102
    return scope["ask"]


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_compilation_during_a_call_delays_the_recording(backend: str) -> None:
    """Sizes change while calls are observed, so code is compiled then: for a size, and for all sizes."""
    sizes = (6, 6, 6, 6, 9, 9, 9, 9, 7, 7, 7, 7, 6, 9, 7)

    def made() -> Any:
        torch.compiler.reset()
        model = network("cpu", dropout=0.2)
        compiled = torch.compile(model, backend=backend)
        return training(model, lambda batch: loss_of(compiled, batch))

    calls = [batches("cpu", 1, rows)[0] for rows in sizes]
    expected = run(made(), calls)
    step = GraphedStep(made(), device=CpuDevice())
    assert_equal(run(step, calls), expected)
    report = step.report()
    assert report.refusals == ()
    assert len(report.recordings) == 3
    assert report.replays >= 1 + 1 + 1 + 3


def test_capture_that_would_compile_is_tried_again() -> None:
    """A hidden number changes where the capture would be, and code is guarded on it. What a compilation computes must
    not lie in the graph's memory."""
    hidden = array.array("d", [0.5])
    compiled_in_captures = []

    def made(device: CpuDevice | None) -> Any:
        torch.compiler.reset()
        model = network("cpu")

        def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
            compiled_in_captures.append(device is not None and device.is_capturing())
            return graph.forward

        @torch.compile(backend=backend, dynamic=False)
        def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
            return x * factor

        def forward(batch: Any) -> torch.Tensor:
            return scaled(loss_of(model, batch), round(hidden[0] * 4) == 2)

        return training(model, forward)

    def between(index: int) -> None:
        hidden[0] = 0.5 if index < 2 else 0.25

    calls = batches("cpu", 9)
    hidden[0] = 0.5
    expected = run(made(None), calls, between)
    device = CpuDevice()
    hidden[0] = 0.5
    step = GraphedStep(made(device), device=device)
    assert_equal(run(step, calls, between), expected)
    report = step.report()
    assert report.refusals == ()
    assert report.replays >= 3
    assert device.captures == 2
    assert len(compiled_in_captures) >= 3 and not any(compiled_in_captures)


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_step_that_compiles_on_every_call_is_finally_refused() -> None:
    model = network("cpu")

    def forward(batch: Any) -> torch.Tensor:
        compiled = torch.compile(lambda x: x * 1, backend="eager")
        torch._dynamo.reset_code(compiled._torchdynamo_orig_callable.__code__)
        return compiled(loss_of(model, batch))

    step = GraphedStep(training(model, forward), device=CpuDevice())
    run(step, batches("cpu", 24))
    (refusal,) = step.report().refusals
    assert "compiles code" in refusal.reason and "recompiles" in refusal.advice
    assert step.report().replays == 0


# Kernels are timed in the first run that needs them.


def timing_kernels(monkeypatch: pytest.MonkeyPatch, times: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function whose first runs time a kernel as Inductor's runtime does, which waits for the GPU."""
    left, waits = array.array("i", [times]), array.array("i", [0])

    def wait(*arguments: Any) -> None:
        waits[0] += 1

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    benchmarker = importlib.import_module("torch._inductor.runtime.benchmarking").InductorBenchmarker

    def doubled(x: torch.Tensor) -> torch.Tensor:
        if left[0]:
            left[0] -= 1
            try:
                benchmarker().benchmark_gpu(lambda: None)
            except (RuntimeError, AssertionError):  # it goes on with events of a GPU
                assert waits[0]
        return x * 2

    return doubled


def test_autotuning_in_first_runs_does_not_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    function = timing_kernels(monkeypatch, 4)
    (graphed,) = GraphedCallables(function, [(torch.ones(3, requires_grad=True),)], device=CpuDevice())
    x = torch.arange(3.0, requires_grad=True)
    assert torch.equal(graphed(x), x * 2)


def test_autotuning_while_observed_does_not_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    model, function = network("cpu"), timing_kernels(monkeypatch, 3)
    step = GraphedStep(training(model, lambda batch: function(loss_of(model, batch))), device=CpuDevice())
    run(step, batches("cpu", 8))
    assert step.report().refusals == ()
    assert step.report().replays == 8 - 5


def test_callables_that_autotune_in_every_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    function = timing_kernels(monkeypatch, 10**6)
    with pytest.raises(StepRefused, match="times kernels"):
        GraphedCallables(function, [(torch.ones(3, requires_grad=True),)], device=CpuDevice())


def test_generated_code_that_waits_is_refused_with_its_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Inductor's generated modules have such names, and lie in a cache of any path."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *arguments: None)
    generated = types.ModuleType("torch._inductor.runtime.compile_tasks.cabc")
    source = "import torch\ndef call(x):\n    torch.cuda.synchronize()\n    return x * 2\n"
    exec(compile(source, str(tmp_path / "cabc.py"), "exec"), vars(generated))  # noqa: S102
    with pytest.raises(StepRefused, match="calls torch\\.cuda\\.synchronize") as raised:
        GraphedCallables(lambda x: generated.call(x), [(torch.ones(3, requires_grad=True),)], device=CpuDevice())
    assert "test_first_runs.py" in str(raised.value.refusal.source_line)


def test_wait_in_the_first_run_only_does_not_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that load themselves on first use wait once."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *arguments: None)
    used = array.array("i", [0])

    def loads_itself(x: torch.Tensor) -> torch.Tensor:
        if not used[0]:
            used[0] = 1
            torch.cuda.synchronize()
        return x * 2

    (graphed,) = GraphedCallables(loads_itself, [(torch.ones(3, requires_grad=True),)], device=CpuDevice())
    x = torch.arange(3.0, requires_grad=True)
    assert torch.equal(graphed(x), x * 2)


def test_autotuning_functions_of_pytorch_exist() -> None:
    import triton

    roots = {"torch": Path(torch.__file__).parents[1], "triton": Path(triton.__file__).parents[1]}
    for place in TUNERS:
        package = place.split("/")[1]
        assert (roots[package] / place.strip("/")).exists(), place
    assert "torch._dynamo.callback" in sys.modules
