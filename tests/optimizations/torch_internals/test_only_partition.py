"""Arguments that are bound go to a graph's one partition in its order, past the code that passes them on."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from optimizations import torch_internals
from optimizations.calls.bound import FEW_ARGUMENTS, READS_BEFORE
from optimizations.calls.shortcut import FULL_CALLS
from optimizations.options import Options
from optimizations.torch_internals.only_partition import Order, only_partition, order_of
from optimizations.trees.graphed_function import EncoreMaker, GraphedFunction

PASSES_ON = """
arg0_1, arg1_1, arg2_1 = args
args.clear()
partition0_args = [arg2_1, arg0_1]
del arg2_1, arg0_1
(buf0, buf1,) = self.partitions[0](partition0_args)
del partition0_args
return (buf1, buf0, buf1, )
"""


def runner_of(body: str, where: Path, partitions: list[Any]) -> Any:
    """An object as Inductor generates it, from a file, so that its source can be read."""
    where.write_text("class Runner:\n    calls = 0\n\n    def call(self, args):\n" + indent(dedent(body), " " * 8))
    spec = importlib.util.spec_from_file_location(where.stem, where)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    runner = module.Runner()
    runner.partitions = partitions
    return runner


def test_order_is_read_from_the_source(tmp_path: Path) -> None:
    runner = runner_of(PASSES_ON, tmp_path / "generated.py", [lambda values: values])
    order = order_of(runner.call)
    assert order == Order(arguments=(2, 0), results=(1, 0, 1), given=2)
    assert runner.call([1, 2, 3]) == (1, 3, 1), "what the order says is what the code does"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("args.clear()\n", "args.clear()\ncpp_fused_b_1(arg1_1)\n"),
        ("args.clear()\n", "args.clear()\ns0 = arg1_1\n"),
        ("args.clear()\n", "args.copy()\n"),
        ("args.clear()\n", ""),
        ("= args\n", "= other\n"),
        ("[arg2_1, arg0_1]", "[arg2_1, buf7]"),
        ("[arg2_1, arg0_1]", "[arg2_1 + 1, arg0_1]"),
        ("self.partitions[0](", "self.partitions[1]("),
        ("self.partitions[0](", "self.partitions[0](*"),
        ("(buf0, buf1,) =", "buf0 ="),
        ("(buf0, buf1,) =", "(buf0, buf0,) ="),
        ("(buf0, buf1,) =", "(arg1_1, buf1,) ="),
        ("return (buf1, buf0, buf1, )", "return (buf1, arg1_1, )"),
        ("return (buf1, buf0, buf1, )", "return (buf1, None, )"),
        ("return (buf1, buf0, buf1, )", "return buf1"),
        ("return (buf1, buf0, buf1, )", "buf1.add_(1)\nreturn (buf1, )"),
        ("arg0_1, arg1_1, arg2_1 =", "arg0_1, arg0_1, arg2_1 ="),
        ("arg0_1, arg1_1, arg2_1 =", "arg0_1, *arg1_1, arg2_1 ="),
    ],
)
def test_code_that_does_anything_else_has_no_order(tmp_path: Path, old: str, new: str) -> None:
    assert old in PASSES_ON
    assert order_of(runner_of(PASSES_ON.replace(old, new, 1), tmp_path / "generated.py", []).call) is None


def test_function_without_source_has_no_order() -> None:
    assert order_of(dict.get) is None


def test_graph_of_two_partitions_or_with_extra_code_has_no_order(tmp_path: Path) -> None:
    runner = runner_of(PASSES_ON, tmp_path / "generated.py", [print])
    assert only_partition(SimpleNamespace(compiled_fn_runner=runner, current_callable=runner.call)) is not None
    around = lambda args: runner.call(args)  # noqa: E731
    assert only_partition(SimpleNamespace(compiled_fn_runner=runner, current_callable=around)) is None
    assert only_partition(SimpleNamespace(compiled_fn_runner=None, current_callable=runner.call)) is None
    runner.partitions.append(print)
    assert only_partition(SimpleNamespace(compiled_fn_runner=runner, current_callable=runner.call)) is None


# Calls

LAYERS = FEW_ARGUMENTS
X = torch.arange(4.0)


@pytest.mark.parametrize(("count", "places"), [(1, {1}), (2, {0, 1})])
def test_partition_gets_the_indices_of_returned_results(tmp_path: Path, count: int, places: set[int]) -> None:
    partition = GraphedFunction(Options(), print, len, is_backward=False, is_inference=False, device_index=0)
    runner, maker = runner_of(PASSES_ON, tmp_path / "generated.py", [partition]), EncoreMaker(Options(), print)
    maker.forward = SimpleNamespace(compiled_fn_runner=runner, current_callable=runner.call)
    maker.forward_returns(count)
    assert partition.callers_get == places
    maker.forward = SimpleNamespace(current_callable=partition)
    maker.forward_returns(count)
    assert partition.callers_get == set(range(count))
    maker.forward_returns(count + 1)
    assert partition.callers_get == set(range(count)), "each forward is reported once"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for scale in self.scales:
            x = x * scale.weight[0] + y
        return x, x - y


class Partitioned:
    """Gives graphs for the CPU the code that passes on to a partition: in reverse order, results as well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: Path) -> None:
        self.passed_on = 0
        self.reached = 0
        self.graphs: list[Any] = []
        self.grad_modes: list[bool] = []
        owner = torch_internals.CompiledFxGraph
        stock = owner.post_compile

        def post_compile(graph: Any, examples: Any, *arguments: Any, **keywords: Any) -> Any:
            result = stock(graph, examples, *arguments, **keywords)
            inner, number = graph.current_callable, len(examples)
            self.graphs.append(graph)

            def partition(values: list[Any]) -> list[Any]:
                self.reached += 1
                self.grad_modes.append(torch.is_grad_enabled())
                given = values[::-1]
                values.clear()
                return list(inner(given))[::-1]

            names = [f"arg{place}_1" for place in range(number)]
            body = f"""
            {", ".join(names)}, = args
            args.clear()
            partition0_args = [{", ".join(reversed(names))}]
            del {", ".join(names)}
            (buf0, buf1, ) = self.partitions[0](partition0_args)
            del partition0_args
            return (buf1, buf0, )
            """
            runner = runner_of(body, where / f"generated{len(self.graphs)}.py", [partition])
            graph.compiled_fn_runner = runner
            graph.current_callable = runner.call
            call = type(runner).call

            def counted(this: Any, args: list[Any]) -> Any:
                self.passed_on += 1
                return call(this, args)

            counted.__wrapped__ = call  # type: ignore[attr-defined]  # its source is that of `call`
            type(runner).call = counted
            graph.current_callable = runner.call
            return result

        monkeypatch.setattr(owner, "post_compile", post_compile)

    def of(self, call: Callable[[], Any]) -> bool:
        """Return whether a call ran the generated code; it reaches the partition once."""
        passed_on, reached = self.passed_on, self.reached
        call()
        assert self.reached == reached + 1
        return self.passed_on > passed_on


@pytest.fixture
def partitioned(fresh_encore: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Partitioned:
    return Partitioned(monkeypatch, tmp_path)


def settled(model: nn.Module) -> Callable[..., Any]:
    run: Callable[..., Any] = torch.compile(model, backend="encore", fullgraph=True)
    for _ in range(max(FULL_CALLS, READS_BEFORE) + 2):
        check(model, run)
    return run


def check(model: nn.Module, run: Callable[..., Any], start: float = 0) -> None:
    x, y = X + start, X * start + 1
    for one, other in zip(run(x, y), model(x, y), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("grad", [False, True])
def test_bound_arguments_are_passed_directly_to_the_partition(partitioned: Partitioned, grad: bool) -> None:
    model = Model().requires_grad_(False)
    with torch.set_grad_enabled(grad):
        run = settled(model)
        for start in range(4):
            assert not partitioned.of(lambda start=start: check(model, run, start))
        assert torch.is_grad_enabled() is grad
    assert partitioned.grad_modes[-1] is False


class Counting(Model):
    """Writes a buffer, and the argument `y`."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        y.add_(1)
        return super().forward(x * self.calls, y)


@torch.no_grad()
def test_only_written_versions_of_a_partition_are_counted_up(partitioned: Partitioned) -> None:
    model, twin = Counting(), Counting()
    twin.load_state_dict(model.state_dict())
    run: Callable[..., Any] = torch.compile(model, backend="encore", fullgraph=True)
    straight = 0
    for start in range(max(FULL_CALLS, READS_BEFORE) + 6):
        x, y, other = X + start, X * start, X * start
        tensors = [model.calls, y, x, *model.parameters()]
        before = [tensor._version for tensor in tensors]
        found: list[Any] = []
        straight += not partitioned.of(lambda x=x, y=y, found=found: found.extend(run(x, y)))
        assert [tensor._version - old for tensor, old in zip(tensors, before, strict=True)] == [1, 1] + [0] * (
            len(tensors) - 2
        ), start
        for one, expected in zip((*found, y), (*twin(x, other), other), strict=True):
            torch.testing.assert_close(one, expected)
    assert straight > 3


class Overlapping(Model):
    """Writes the argument `y`, which may share memory with `x`."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y.add_(1)
        return super().forward(x, y)


@torch.no_grad()
def test_arguments_sharing_written_memory_use_the_wrapper(partitioned: Partitioned) -> None:
    """The graph takes that memory in their place. The partition once took the views for other arguments."""
    model = Overlapping()
    run: Callable[..., Any] = torch.compile(model, backend="encore", fullgraph=True)
    with torch_internals.fresh_cache():  # graphs from a cache come with examples of the views
        for start in range(max(FULL_CALLS, READS_BEFORE) + 4):
            memory, other = (torch.arange(6.0) + start for _ in range(2))
            found: list[Any] = []
            assert partitioned.of(lambda memory=memory, found=found: found.extend(run(memory[:4], memory[2:])))
            for one, expected in zip((*found, memory), (*model(other[:4], other[2:]), other), strict=True):
                torch.testing.assert_close(one, expected)


@torch.no_grad()
def test_profiler_and_debugger_calls_go_through_all_code(
    partitioned: Partitioned, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    run = settled(model)
    with torch.profiler.profile():
        assert partitioned.of(lambda: check(model, run))
    with monkeypatch.context() as patch:
        patch.setattr(torch_internals.inductor_debug, "RECORD_GRAPH_EXECUTION", True)
        assert partitioned.of(lambda: check(model, run))
    assert not partitioned.of(lambda: check(model, run))


@torch.no_grad()
def test_replacement_of_the_graph_is_called(partitioned: Partitioned) -> None:
    model = Model()
    run = settled(model)
    (graph,) = partitioned.graphs
    generated = graph.current_callable
    graph.current_callable = lambda arguments: generated(arguments)
    assert partitioned.of(lambda: check(model, run))


@torch.no_grad()
def test_partition_with_other_results_than_declared_is_an_error(partitioned: Partitioned) -> None:
    """The code around it would fail, too; results are not taken from wrong places."""
    model = Model()
    run = settled(model)
    (graph,) = partitioned.graphs
    (partition,) = graph.compiled_fn_runner.partitions
    graph.compiled_fn_runner.partitions[0] = lambda values: [torch.zeros(4), *partition(values)]
    with pytest.raises(RuntimeError, match="a graph returned 3 results, its source says 2"):
        run(X, X + 1)
    graph.compiled_fn_runner.partitions[0] = partition
    check(model, run)
