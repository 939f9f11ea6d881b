"""The log records reads and writes of launches, which wait for those that they conflict with, and for no others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_tensor_map import make_hidden_map, make_tensor_map
from hypothesis import given
from hypothesis import strategies as st

from optimizations import torch_internals
from optimizations.concurrency import launch_log
from optimizations.concurrency.hidden_memory import with_hidden_memory, with_moving_inputs
from optimizations.concurrency.launch_log import (
    LaunchLog,
    Logged,
    kernel_memory,
    operator_memory,
)
from optimizations.concurrency.order import Launch, LaunchOrder, Span, order_launches
from optimizations.graph.records import (
    CapturedGraph,
    KernelNode,
    MemcpyEnd,
    MemcpyNode,
    OtherNode,
    Parameter,
)
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


class Kernel:
    """Stands for a Triton kernel: adds a node and writes its last argument."""

    def __init__(self, graph: Graph, *names: str, mutated: tuple[str, ...] = ()) -> None:
        self.graph = graph
        self.triton_meta = {"signature": dict.fromkeys(names, "*fp32")}
        self.mutated_arg_names = list(mutated)
        self.custom_kernel = False
        self.fn = SimpleNamespace(__name__="triton_poi_fused_0")

    def run(self, *arguments: Any, stream: int) -> None:
        self.graph.nodes += 1


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
        (SimpleNamespace(namespace="mylib", _schema=torch.ops.aten.relu.default._schema), "custom operator"),
        (torch.ops.aten._linalg_svd.default, "its library"),
    ],
)
def test_operator_of_unknown_memory_is_a_barrier(func: Any, said: str) -> None:
    assert said in str(operator_memory(func, (torch.zeros(2, 2),), {})[2])


def test_log_orders_kernels_and_operators(graph: Graph) -> None:
    x, left, right, both = (torch.zeros(8) for _ in range(4))
    module: dict[str, Any] = {"k0": Kernel(graph, "in_ptr0", "out_ptr0"), "other": 3}
    kernel = module["k0"]
    log = LaunchLog(graph.count, [x], device_type="cpu")
    with log.noting(module):
        module["k0"].run(x, left, stream=0)
        module["k0"].run(x, right, stream=0)
        module["k0"].run(torch.cat([left, right])[:8], both, stream=0)
    assert module["k0"] is kernel
    assert [one.launch.first for one in log.logged] == [0, 1, 2]
    assert log.logged[0].launch.writes == (extent(left),)
    assert order_launches([one.launch for one in log.logged]).waits_for[:2] == ((), ())


def test_kernels_of_several_modules_are_logged_and_restored(graph: Graph) -> None:
    modules: list[dict[str, Any]] = [{"k0": Kernel(graph, "out_ptr0")}, {"k0": Kernel(graph, "out_ptr0"), "x": 1}]
    originals = [dict(module) for module in modules]
    log = LaunchLog(graph.count, device_type="cpu")
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


def test_operators_are_logged_inside_a_users_mode(graph: Graph) -> None:
    log = LaunchLog(graph.count, device_type="cpu")
    a, out = torch.zeros(2), torch.zeros(2)
    with log.noting(operators=False):
        log.operator(torch.ops.aten.relu.out, (a,), {"out": out}, graph.adding(a))
    (logged,) = log.logged
    assert logged.launch.name == "aten.relu.out"
    assert extent(out) in logged.launch.writes


def test_partial_result_counts_with_its_padding(graph: Graph) -> None:
    padded = torch.zeros(4, 8)
    log = LaunchLog(graph.count, device_type="cpu")
    with log.noting({}):
        log.note("aten.attention", graph.adding(padded[:, :5]), [], [], is_operator=True)
    assert log.logged[-1].launch.writes == (extent(padded),)


def test_nodes_of_unknown_origin_are_a_barrier(graph: Graph) -> None:
    log = LaunchLog(graph.count, device_type="cpu")
    module: dict[str, Any] = {"k0": Kernel(graph, "out_ptr0")}
    graph.nodes = 2
    with log.noting(module):
        module["k0"].run(torch.zeros(2), stream=0)
        graph.nodes += 1
    launches = [one.launch for one in log.logged]
    assert [one.barrier is not None for one in launches] == [True, False, True]
    assert order_launches(launches).waits_for == ((), (0,), (1,))


def test_failed_node_count_ends_only_the_log() -> None:
    def count() -> int:
        raise AttributeError("no such call\nof the driver")

    log = LaunchLog(count, device_type="cpu")
    with log.noting({}):
        result = log.note("aten.relu.default", lambda: 3, [], [], is_operator=True)
    assert result == 3
    assert log.failure is not None and "no such call" in log.failure
    assert log.logged == []


def test_error_in_the_log_does_not_end_the_capture(graph: Graph) -> None:
    def allocated() -> int:
        raise torch.OutOfMemoryError("no statistics")

    log = LaunchLog(graph.count, allocated_bytes=allocated, device_type="cpu")
    x = torch.zeros(2)
    with log.noting({}):
        assert log.operator(torch.ops.aten.relu.default, (x,), {}, lambda: 3) == 3
        assert log.operator(object(), (x,), {}, lambda: 4) == 4
    assert "no statistics" in str(log.failure) and log.logged == []


def test_tensor_without_memory_is_not_logged(graph: Graph) -> None:
    zeros = torch._efficientzerotensor((4,))
    log = LaunchLog(graph.count, device_type="cpu")
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


def kernel_node(*words: int) -> KernelNode:
    data = b"".join(word.to_bytes(8, "little") for word in words)
    return KernelNode(
        name="gemm", function=1, grid=(1, 1, 1), block=(1, 1, 1), shared_bytes=0,
        parameters=(Parameter(offset=0, size=len(data), data=data),),
    )  # fmt: skip


POOL = [(0x1000, 0x9000)]


RESULT = 0x2000


def hidden(
    words: tuple[int, ...],
    live: tuple[Span, ...],
    never_freed: tuple[Span, ...] = (),
    own_bytes: int | None = None,
) -> Launch:
    launch = Launch("aten.mm.out", 0, reads=((0x1000, 0x1100),), writes=((0x2000, 0x2100),))
    graph = CapturedGraph(nodes=(kernel_node(*words),), edges=())
    return with_hidden_memory([Logged(launch, True, live, own_bytes)], graph, POOL, never_freed)[0]


TENSORS = ((0x1000, 0x1100), (0x2000, 0x2100), (0x4000, 0x4100))
LATER = ((0x6000, 0x6100), (0x6100, 0x6200))


@pytest.mark.parametrize(
    ("address", "live", "never_freed", "own_bytes", "expected"),
    [
        (0x2010, (), (), None, None),  # declared
        (0x3000, TENSORS, (), None, (0x2100, 0x4000)),  # between live tensors
        (0x3000, TENSORS, (), 0x100, (0x2F00, 0x3100)),  # as large as the operator's allocation
        (0x6000, TENSORS, LATER, 0x200, (0x5E00, 0x6200)),  # a later block may be smaller than the workspace
        (0x6000, (*TENSORS, (0x8000, 0x8100)), LATER, None, (0x4100, 0x8000)),
        (0x6800, (), ((0x6000, 0x7000),), 0, (0x6000, 0x7000)),  # a block that is never freed
        (0x6800, (), ((0x6000, 0x7000),), 0x100, (0x6000, 0x7000)),  # or one that is larger than the workspace
        (0x4010, TENSORS, (), 0x10, (0x4000, 0x4100)),  # a live tensor that was not passed
    ],
)
def test_address_in_a_parameter_counts_as_memory(
    address: int, live: tuple[Span, ...], never_freed: tuple[Span, ...], own_bytes: int | None, expected: Span | None
) -> None:
    found = hidden((0x1000, RESULT, 7, 0xFF0000, address), live, never_freed, own_bytes)
    assert set(found.writes) == {(0x2000, 0x2100), *([expected] if expected else [])}
    assert set(found.reads) == {(0x1000, 0x1100), *([expected] if expected else [])}


def test_scratch_of_a_triton_kernel_counts_as_the_segment(graph: Graph) -> None:
    """Triton frees it after the launch, so a smaller block may be at its address when the capture ends."""
    log, out = LaunchLog(graph.count, device_type="cpu"), torch.zeros(4)
    launched(graph, log, (out,))
    captured = CapturedGraph(nodes=(kernel_node(out.data_ptr(), 0x6000),), edges=())
    (found,) = with_hidden_memory(log.logged, captured, POOL, ((0x6000, 0x6200),))
    assert found.writes == (extent(out), POOL[0]) and found.barrier is None
    (plain,) = with_hidden_memory(log.logged, CapturedGraph(nodes=(kernel_node(),), edges=()), POOL, ())
    assert plain.writes == (extent(out),)


def test_unlogged_live_tensors_count_as_the_segment(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_log, "MOST_LIVE", 3)
    given = [torch.zeros(2) for _ in range(3)]
    allocated = iter(range(0, 1 << 20, 256))
    log = LaunchLog(graph.count, allocated_bytes=lambda: next(allocated), device_type="cpu")

    with log.noting({}):
        for _ in range(3):
            log.note("aten.add_.Tensor", graph.adding(given[0]), given, given[:1], is_operator=True)
    assert [len(one.live) for one in log.logged] == [3, 0, 0]
    assert [one.own_bytes for one in log.logged] == [256, 256, 256]


def test_address_in_an_input_not_passed_counts() -> None:
    launch = Launch("aten.mm.out", 0, writes=((0x2000, 0x2100),))
    graph = CapturedGraph(nodes=(kernel_node(0x2000, 0xA010),), edges=())
    (found,) = with_hidden_memory([Logged(launch, True)], graph, POOL, (), [(0xA000, 0xB000)])
    assert (0xA000, 0xB000) in found.reads and (0xA000, 0xB000) in found.writes


def kernel_with_map(make: Callable[[int], bytes]) -> KernelNode:
    """A kernel that gets its input as an address, and its result in a tensor map."""
    data = (0x1000).to_bytes(8, "little") + make(0x2000)
    return kernel_node().model_copy(update={"parameters": (Parameter(offset=0, size=len(data), data=data),)})


HOST, DEVICE = (MemcpyEnd(memory=memory, address=1) for memory in ("host", "device"))


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ((kernel_node(RESULT), kernel_node(7, 0xFF0000)), "no parameter of gemm is a known address"),
        ((kernel_with_map(make_tensor_map),), None),  # its plain address is found
        ((kernel_with_map(make_hidden_map),), "address of a result"),
        ((OtherNode(type_name="GRAPH"),), "a node of it is of the kind GRAPH"),
        ((OtherNode(type_name="HOST"),), "a node of it is of the kind"),
        ((MemcpyNode(source=HOST, destination=DEVICE, width_bytes=4, height=1, depth=1),), "copies between"),
    ],
)
def test_operator_whose_nodes_hide_memory_is_a_barrier(nodes: tuple[Any, ...], said: str | None) -> None:
    launch = Launch("aten.mm.out", 0, len(nodes), reads=((0x1000, 0x1100),), writes=((RESULT, 0x2100),))
    (found,) = with_hidden_memory([Logged(launch, True)], CapturedGraph(nodes=nodes, edges=()), POOL, ())
    assert found.barrier is None if said is None else said in str(found.barrier)


def test_users_kernel_is_a_barrier_despite_argument_names(graph: Graph) -> None:
    log = LaunchLog(graph.count, device_type="cpu")
    (logged,) = launched(graph, log, (torch.zeros(2), torch.zeros(2)), custom=True)
    assert "does not name" in str(logged.launch.barrier)


def test_error_in_the_function_restores_its_kernels(graph: Graph) -> None:
    kernel = Kernel(graph, "out_ptr0")
    log = LaunchLog(graph.count, device_type="cpu")
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


# Launches of a captured graph wait for those that they conflict with, and for no others.


SPANS = st.tuples(st.integers(0, 24), st.integers(1, 6)).map(lambda pair: (pair[0], pair[0] + pair[1]))
DRAWN = st.lists(
    st.tuples(
        st.lists(SPANS, max_size=3),
        st.lists(SPANS, max_size=2),
        st.integers(1, 3),
        st.integers(0, 9).map(lambda n: n == 0),
    ),
    max_size=14,
)


def launches_of(drawn: list[tuple[list[Span], list[Span], int, bool]]) -> list[Launch]:
    launches, first = [], 0
    for number, (reads, writes, count, is_barrier) in enumerate(drawn):
        barrier = "a custom operator" if is_barrier else None
        launches.append(Launch(f"launch {number}", first, count, tuple(reads), tuple(writes), barrier))
        first += count
    return launches


def overlap(some: tuple[Span, ...], others: tuple[Span, ...]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)


def conflict(one: Launch, other: Launch) -> bool:
    if one.barrier or other.barrier:
        return True
    return overlap(one.writes, other.reads + other.writes) or overlap(one.reads, other.writes)


def reachable(order: LaunchOrder) -> list[set[int]]:
    before: list[set[int]] = []
    for waits in order.waits_for:
        before.append(set(waits).union(*(before[one] for one in waits)))
    return before


def brute_force(launches: list[Launch]) -> list[set[int]]:
    before: list[set[int]] = []
    for index, launch in enumerate(launches):
        direct = {earlier for earlier in range(index) if conflict(launches[earlier], launch)}
        before.append(direct.union(*(before[one] for one in direct)))
    return before


@given(DRAWN)
def test_order_follows_from_all_conflicts(drawn: list[tuple[list[Span], list[Span], int, bool]]) -> None:
    launches = launches_of(drawn)
    assert reachable(order_launches(launches)) == brute_force(launches)


@given(DRAWN)
def test_order_has_no_redundant_waits(drawn: list[tuple[list[Span], list[Span], int, bool]]) -> None:
    order = order_launches(launches_of(drawn))
    before = reachable(order)
    for waits in order.waits_for:
        for one in waits:
            assert not any(one in before[other] for other in waits if other != one)


@given(DRAWN)
def test_node_edges_lead_forward_and_keep_launches(drawn: list[tuple[list[Span], list[Span], int, bool]]) -> None:
    order = order_launches(launches_of(drawn))
    edges = order.node_edges()
    assert all(source < target for source, target in edges)
    assert len(set(edges)) == len(edges)
    for launch in order.launches:
        assert {*pairwise(range(launch.first, launch.last + 1))} <= set(edges)


def test_independent_branches_run_concurrently() -> None:
    order = order_launches(
        [
            Launch("split", 0, writes=((0, 8), (8, 16))),
            Launch("left", 1, reads=((0, 8),), writes=((16, 24),)),
            Launch("right", 2, reads=((8, 16),), writes=((24, 32),)),
            Launch("join", 3, reads=((16, 32),), writes=((32, 40),)),
        ]
    )
    assert order.waits_for == ((), (0,), (0,), (1, 2))
    assert order.branches == 2
    assert order.levels() == [0, 1, 1, 2]


def test_memory_in_many_pieces_is_ordered_in_seconds() -> None:
    count = 4000
    launches = [Launch("a part", index, 1, (), ((index, index + 1),)) for index in range(count)]
    launches += [Launch("all", count + index, 1, ((0, count),), ((0, count),)) for index in range(count)]
    began_s = time.process_time()
    order = order_launches(launches)
    assert len(order.waits_for[count]) == count and time.process_time() - began_s < 5


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
