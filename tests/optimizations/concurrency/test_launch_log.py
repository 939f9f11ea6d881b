"""The log records reads and writes of launches, which wait for those that they conflict with, and for no others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optimizations import torch_internals
from optimizations.concurrency.hidden_memory import with_moving_inputs
from optimizations.concurrency.launch_log import (
    LEAST_WIDTH,
    LaunchLog,
    Logged,
    kernel_memory,
    operator_memory,
)
from optimizations.concurrency.order import Launch, Span, order_launches
from optimizations.written_operands import written


def extent(tensor: torch.Tensor) -> Span:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


class Graph:
    """Counts nodes."""

    def __init__(self) -> None:
        self.nodes = 0

    def count(self) -> int:
        return self.nodes

    def adding(self, result: Any = None) -> Callable[[], Any]:
        """An operator that adds a node."""

        def run() -> Any:
            self.nodes += 1
            return result

        return run


@pytest.fixture
def graph() -> Graph:
    return Graph()


@pytest.fixture
def log(graph: Graph) -> LaunchLog:
    return LaunchLog(graph.count, device_type="cpu")


class Kernel:
    """Stands for a Triton kernel: adds a node and writes its last argument."""

    def __init__(self, graph: Graph, *names: str, mutated: tuple[str, ...] = ()) -> None:
        self.graph = graph
        self.triton_meta = {"signature": dict.fromkeys(names, "*fp32")}
        self.mutated_arg_names = list(mutated)
        self.custom_kernel = False
        self.fn = SimpleNamespace(__name__="triton_poi_fused_0")

    def run(self, *arguments: Any, stream: int) -> None:
        self.graph.nodes += bool(arguments[-1].numel())


@pytest.fixture(autouse=True)
def kernels_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "CachingAutotuner", Kernel)


def launched(graph: Graph, log: LaunchLog, *launches: tuple[Any, ...], custom: bool = False) -> list[Logged]:
    """Launch one kernel on these tensors, of which it writes the last, and return the log."""
    reads = [f"in_ptr{place}" for place in range(len(launches[0]) - 1)]
    module: dict[str, Any] = {"k0": Kernel(graph, *reads, "out_ptr0")}
    module["k0"].custom_kernel = custom
    with log.noting(module):
        for arguments in launches:
            module["k0"].run(*arguments, stream=0)
    return log.logged


def test_kernel_arguments_are_read_or_written_by_name() -> None:
    a, b, c, d = (torch.zeros(4) for _ in range(4))
    names = ("in_ptr0", "in_out_ptr0", "out_ptr0", "ws_ptr0", "xnumel")
    reads, writes, barrier = kernel_memory(names, (a, b, c, d, 4), frozenset())
    assert barrier is None
    assert [one.data_ptr() for one in writes] == [one.data_ptr() for one in (b, c, d)]
    assert a.data_ptr() in [one.data_ptr() for one in reads]


def test_mutated_kernel_argument_is_written() -> None:
    a = torch.zeros(4)
    assert kernel_memory(("in_ptr0",), (a,), frozenset({"in_ptr0"}))[1] == [a]


@pytest.mark.parametrize(
    ("names", "argument", "said"),
    [
        (("x_pointer",), torch.zeros(2), "does not name"),
        ((), torch.zeros(2), "does not name"),
        (("in_ptr0",), object(), "may hold addresses"),
    ],
)
def test_kernel_argument_of_unknown_memory_is_a_barrier(names: tuple[str, ...], argument: Any, said: str) -> None:
    assert said in str(kernel_memory(names, (argument,), frozenset())[2])


def test_operator_writes_are_taken_from_its_schema() -> None:
    a, b, out = (torch.zeros(2, 2) for _ in range(3))
    reads, writes, barrier = operator_memory(torch.ops.aten.mm.out, (a, b), {"out": out})
    assert writes == [out] and reads[:2] == [a, b] and barrier is None


@pytest.mark.parametrize(
    ("func", "said"),
    [
        (mock.Mock(namespace="mylib", _schema=torch.ops.aten.relu.default._schema), "custom operator"),
        (torch.ops.aten._linalg_svd.default, "its library"),
    ],
)
def test_operator_of_unknown_memory_is_a_barrier(func: Any, said: str) -> None:
    assert said in str(operator_memory(func, (torch.zeros(2, 2),), {})[2])


BUFFERS = st.lists(st.integers(0, 5).map(lambda number: (8 * number, 8 * number + 8)), max_size=3).map(tuple)
LAUNCHES = st.lists(st.tuples(BUFFERS, BUFFERS, st.sampled_from([None, None, None, "barrier"])), max_size=12)


@given(LAUNCHES)
def test_narrow_log_has_few_independent_launches(drawn: list[tuple[Any, Any, Any]]) -> None:
    """The spans are equal or disjoint, so that the longest path is that of the order."""
    launches = [Launch(f"k{index}", index, reads=a, writes=b, barrier=c) for index, (a, b, c) in enumerate(drawn)]
    log = LaunchLog(lambda: 0)
    log.logged += [Logged(one, False) for one in launches]
    order = order_launches(launches)
    assert log.is_narrow == (len(launches) < LEAST_WIDTH * (1 + max(order.levels(), default=-1)))


def test_kernels_of_several_modules_are_logged_and_restored(graph: Graph, log: LaunchLog) -> None:
    modules: list[dict[str, Any]] = [{"k0": Kernel(graph, "out_ptr0")}, {"k0": Kernel(graph, "out_ptr0"), "x": 1}]
    originals = [dict(module) for module in modules]
    with log.noting(*modules):
        for module in modules:
            module["k0"].run(torch.zeros(2), stream=0)
    assert [one.launch.first for one in log.logged] == [0, 1]
    assert modules == originals


@pytest.mark.parametrize("is_step", [True, False])
def test_passed_view_counts_with_its_whole_storage(graph: Graph, is_step: bool) -> None:
    whole = torch.zeros(16)
    log = LaunchLog(graph.count, None if is_step else [whole[4:8]], device_type="cpu")
    assert launched(graph, log, (whole[4:8], whole.new_zeros(4)))[-1].launch.reads[0] == extent(whole)


@pytest.mark.parametrize(("given", "in_autograd"), [((), False), (None, True)])
def test_autograd_thread_is_logged_in_steps(graph: Graph, given: tuple[()] | None, in_autograd: bool) -> None:
    """The thread simulates one of autograd's, which a CPU program does not have."""
    module: dict[str, Any] = {"k0": Kernel(graph, "out_ptr0")}
    log = LaunchLog(graph.count, given, device_type="cpu")

    class Run(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            module["k0"].run(torch.zeros(2), stream=0)
            return gradients[0]

    result = Run.apply(torch.ones(2, requires_grad=True)).sum()
    with log.noting(module):
        thread = threading.Thread(target=result.backward)
        thread.start()
        thread.join()
    assert [one.launch.name for one in log.logged] == (
        ["triton_poi_fused_0"] if in_autograd else ["unknown, at the end"]
    )


def test_memory_allocated_for_an_argument_counts(graph: Graph, log: LaunchLog) -> None:
    a = torch.zeros(2)
    with log.noting(operators=False):
        log.operator(torch.ops.aten.resize_.default, (a, [4096]), {}, lambda: graph.adding(a.resize_(4096))())
    assert extent(a) in log.logged[0].launch.writes


def test_partial_result_counts_with_its_padding(graph: Graph, log: LaunchLog) -> None:
    padded = torch.zeros(4, 8)
    with log.noting({}):
        log.note("aten.attention", graph.adding(padded[:, :5]), [], [], is_operator=True)
    assert log.logged[-1].launch.writes == (extent(padded),)


def test_nodes_of_unknown_origin_are_a_barrier(graph: Graph, log: LaunchLog) -> None:
    module: dict[str, Any] = {"k0": Kernel(graph, "out_ptr0")}
    graph.nodes = 2
    with log.noting(module):
        module["k0"].run(torch.zeros(2), stream=0)
        graph.nodes += 1
    launches = [one.launch for one in log.logged]
    assert [one.barrier is not None for one in launches] == [True, False, True]
    assert order_launches(launches).waits_for == ((), (0,), (1,))


@pytest.mark.parametrize(("size", "names"), [(2, ["triton_poi_fused_0"]), (0, ["unknown, before triton_poi_fused_0"])])
def test_node_of_others_before_a_kernel_is_a_barrier(graph: Graph, log: LaunchLog, size: int, names: list[str]) -> None:
    module: dict[str, Any] = {"k0": Kernel(graph, "out_ptr0")}
    with log.noting(module, operators=False):
        graph.nodes += 1
        module["k0"].run(torch.zeros(size), stream=0)
    assert [one.launch.name for one in log.logged] == names
    assert "came from neither" in str(log.logged[0].launch.barrier)


@pytest.mark.parametrize(("notes_memory", "readings"), [(True, 2), (False, 0)])
def test_launch_is_noted_with_few_questions(graph: Graph, notes_memory: bool, readings: int) -> None:
    """Nodes are counted after a kernel, and around an operator; what is allocated is read around an operator."""
    asked = {"nodes": 0, "allocated": 0}

    def count(what: str, answer: Callable[[], int]) -> int:
        asked[what] += 1
        return answer()

    log = LaunchLog(
        lambda: count("nodes", graph.count),
        allocated_bytes=lambda: count("allocated", lambda: 0),
        device_type="cpu",
        notes_memory=notes_memory,
    )
    module: dict[str, Any] = {"k0": Kernel(graph, "in_ptr0", "out_ptr0")}
    a, b = torch.zeros(2), torch.zeros(2)
    with log.noting(module, operators=False):
        asked["nodes"] = 0
        for _ in range(3):
            module["k0"].run(a, b, stream=0)
        assert asked == {"nodes": 3, "allocated": 0}
        log.operator(torch.ops.aten.relu.out, (a,), {"out": b}, graph.adding(b))
        assert asked == {"nodes": 5, "allocated": readings}


def test_lifetimes_are_those_of_the_storages(graph: Graph, log: LaunchLog) -> None:
    module: dict[str, Any] = {"k0": Kernel(graph, "in_ptr0", "out_ptr0")}
    left, right, freed = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    span = extent(freed)
    with log.noting(module, operators=False):
        module["k0"].run(left, freed, stream=0)
        module["k0"].run(freed, left, stream=0)
        del freed
        module["k0"].run(left, right, stream=0)
        later = torch.zeros(2)
        log.note("aten.relu.default", graph.adding(later), [left], [], is_operator=True)
        resized = extent(right)
        right.untyped_storage().resize_(1 << 12)
        module["k0"].run(left, right, stream=0)
    found = {(one.span, one.first): (one.last, one.gone) for one in log.lifetimes}
    assert found[span, 0] == (1, 2)
    assert found[extent(left), 0] == (5, None), "it is alive at the end"
    assert found[resized, 2] == (2, 4)
    assert found[extent(later), 4] == (5, None), "an operator's result is alive after it"


@pytest.mark.parametrize("failing", ["nodes", "allocated"])
def test_error_in_the_log_does_not_end_the_capture(graph: Graph, failing: str) -> None:
    def fails() -> int:
        raise torch.OutOfMemoryError("no statistics\nof the driver")

    count = fails if failing == "nodes" else graph.count
    log = LaunchLog(count, allocated_bytes=fails, device_type="cpu")
    x = torch.zeros(2)
    with log.noting({}):
        assert log.operator(torch.ops.aten.relu.default, (x,), {}, lambda: 3) == 3
        assert log.operator(object(), (x,), {}, lambda: 4) == 4
    assert "no statistics" in str(log.failure) and log.logged == []


def test_tensor_without_memory_is_not_logged(graph: Graph, log: LaunchLog) -> None:
    zeros = torch._efficientzerotensor((4,))
    with log.noting({}):
        log.operator(torch.ops.aten.add.Tensor, (zeros, zeros), {}, graph.adding(zeros))
    assert log.failure is None
    assert (log.logged[0].launch.reads, log.logged[0].launch.writes) == ((), ())


def test_freed_memory_is_kept_up_to_the_limit(graph: Graph) -> None:
    log = LaunchLog(graph.count, keep_bytes=400, device_type="cpu")
    launched(graph, log, *((torch.zeros(size),) for _ in range(20) for size in (10, 100)))
    assert log.kept_bytes == 400


@pytest.mark.parametrize(("size_bytes", "kept_bytes"), [(1 << 20, 1 << 20), ((1 << 20) + 4, 0)])
def test_only_tensors_with_segments_of_their_own_are_kept(graph: Graph, size_bytes: int, kept_bytes: int) -> None:
    log = LaunchLog(graph.count, keep_bytes=1 << 30, device_type="cpu")
    launched(graph, log, (torch.empty(size_bytes // 4),))
    assert log.kept_bytes == kept_bytes


def test_workspace_of_an_operator_is_measured(graph: Graph) -> None:
    allocated = iter(range(0, 1 << 20, 256))
    log = LaunchLog(graph.count, allocated_bytes=lambda: next(allocated), keep_bytes=1 << 16, device_type="cpu")
    run = graph.adding(torch.zeros(16))
    with log.noting({}):
        log.note("aten.addmm.default", run, [], [], is_operator=True)
    assert log.logged[-1].own_bytes == 256 - 64
    assert log.kept_bytes == 256


def test_users_kernel_is_a_barrier_despite_argument_names(graph: Graph, log: LaunchLog) -> None:
    (logged,) = launched(graph, log, (torch.zeros(2), torch.zeros(2)), custom=True)
    assert "does not name" in str(logged.launch.barrier)


def test_error_in_the_function_restores_its_kernels(graph: Graph, log: LaunchLog) -> None:
    kernel = Kernel(graph, "out_ptr0")
    module: dict[str, Any] = {"k0": kernel}
    with pytest.raises(ValueError, match="of the program"), log.noting(module):
        raise ValueError("of the program")
    assert module["k0"] is kernel
    assert not log.is_noted()


@pytest.mark.parametrize(("writes", "waits_for"), [("neither", ()), ("moving", (0, 1)), ("fixed", (0,))])
def test_written_input_waits_for_those_it_may_overlap(graph: Graph, writes: str, waits_for: tuple[int, ...]) -> None:
    """Launch 0 reads a moving input, 1 a fixed one, 2 writes a moving or a fixed one, or neither."""
    moving, other, fixed, statistics = (torch.zeros(8) for _ in range(4))
    log = LaunchLog(graph.count, [moving, other, fixed, statistics], [moving, other], device_type="cpu")
    results = [torch.zeros(8) for _ in range(3)]
    written = {"moving": other, "fixed": statistics, "neither": results[2]}[writes]
    logged = launched(graph, log, (moving, results[0]), (fixed, results[1]), (results[2], written))
    launches = [one.launch for one in logged]
    waits = order_launches(with_moving_inputs(logged, launches, log.inputs)).waits_for
    assert waits == ((), (), waits_for)


@pytest.mark.parametrize("is_freed", [True, False])
def test_tensor_in_memory_of_a_freed_input_is_none(graph: Graph, is_freed: bool) -> None:
    memory = np.zeros(8, np.float32)
    inputs = [torch.zeros(8), torch.from_numpy(memory)]
    module: dict[str, Any] = {"k0": Kernel(graph, "in_ptr0", "out_ptr0")}
    log = LaunchLog(graph.count, inputs, inputs, device_type="cpu")
    results = [torch.zeros(8) for _ in range(2)]
    with log.noting(module):
        module["k0"].run(inputs[1], results[0], stream=0)
        kept = None if is_freed else inputs[1]
        del inputs[1]
        module["k0"].run(results[1], torch.from_numpy(memory), stream=0)
        module["k0"].run(inputs[0], results[0], stream=0)
    del kept
    launches = [one.launch for one in log.logged]
    waits = order_launches(with_moving_inputs(log.logged, launches, log.inputs)).waits_for
    assert waits == ((), (0,), (0,) if is_freed else (1,))


# Written operands are found by the operator's schema, or despite a wrong one.


ops = torch.ops.aten
X, MEAN, VAR, OUT = (torch.zeros(2, 2), *(torch.zeros(2) for _ in range(2)), torch.zeros(2, 2))
STATISTICS = [MEAN, VAR]


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expected"),
    [
        (ops.relu.default, (X,), {}, []),
        (ops.mm.out, (X, X), {"out": OUT}, [OUT]),
        (ops._foreach_add_.Scalar, ([X, OUT], 1), {}, [[X, OUT]]),
        (ops.native_batch_norm.default, (X, None, None, MEAN, VAR, True, 0.1, 1e-5), {}, STATISTICS),
        (ops.native_batch_norm.default, (X, None, None, MEAN, VAR, False, 0.1, 1e-5), {}, []),
        (ops.cudnn_batch_norm.default, (X, X, None, MEAN, VAR, True, 0.1, 1e-5), {}, STATISTICS),
        (ops._native_batch_norm_legit.default, (X, None, None, MEAN, VAR, True, 0.1, 1e-5), {}, STATISTICS),
        (ops.batch_norm_update_stats.default, (X, MEAN, VAR, 0.1), {}, STATISTICS),
        (ops.batch_norm_gather_stats_with_counts.default, (X, X, X, MEAN, VAR, 0.1, 1e-5, X), {}, STATISTICS),
        (ops._native_batch_norm_legit_no_training.default, (X, None, None, MEAN, VAR, 0.1, 1e-5), {}, []),
        (ops.native_batch_norm_backward.default, (X, X, None, MEAN, VAR, None, None, True, 1e-5, [True]), {}, []),
    ],
)
def test_written_operands_are_found(func: Any, args: tuple[Any, ...], kwargs: Any, expected: list[Any]) -> None:
    found = list(written(func, args, kwargs))
    assert len(found) == len(expected)
    assert all(one is other or isinstance(one, list) for one, other in zip(found, expected, strict=True))
