"""The log records reads and writes of launches from arguments, schemas and node parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_tensor_map import make_hidden_map, make_tensor_map

from optimizations import torch_internals
from optimizations.concurrency import launch_log
from optimizations.concurrency.hidden_memory import with_hidden_memory, with_moving_inputs
from optimizations.concurrency.launch_log import (
    LaunchLog,
    Logged,
    kernel_memory,
    operator_memory,
)
from optimizations.concurrency.order import Launch, Span, order_launches
from optimizations.graph.records import (
    CapturedGraph,
    ChildGraphNode,
    KernelNode,
    MemcpyEnd,
    MemcpyNode,
    OtherNode,
    Parameter,
)


def extent(tensor: torch.Tensor) -> Span:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


class Graph:
    """Counts nodes: each operator on tensors adds one."""

    def __init__(self) -> None:
        self.nodes = 0

    def count(self) -> int:
        return self.nodes


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
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


@pytest.mark.parametrize("names", [("x_pointer",), ()])
def test_kernel_argument_without_inductors_name_is_a_barrier(names: tuple[str, ...]) -> None:
    assert "does not name" in str(kernel_memory(names, (torch.zeros(2),), frozenset())[2])


def test_kernel_argument_that_may_hold_addresses_is_a_barrier() -> None:
    assert "may hold addresses" in str(kernel_memory(("in_ptr0",), (object(),), frozenset())[2])


def test_operator_writes_are_taken_from_its_schema() -> None:
    a, b, out = (torch.zeros(2, 2) for _ in range(3))
    reads, writes, barrier = operator_memory(torch.ops.aten.mm.out, (a, b), {"out": out})
    assert writes == [out] and reads[:2] == [a, b] and barrier is None


def test_custom_operator_is_a_barrier() -> None:
    func = SimpleNamespace(namespace="mylib", _schema=torch.ops.aten.relu.default._schema)
    assert "custom operator" in str(operator_memory(func, (torch.zeros(1),), {})[2])


def test_library_with_pointers_in_device_memory_is_a_barrier() -> None:
    assert "its library" in str(operator_memory(torch.ops.aten._linalg_svd.default, (torch.zeros(2, 2),), {})[2])


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


def test_view_counts_with_its_storage_if_all_may_be_passed(graph: Graph) -> None:
    whole = torch.zeros(16)
    module: dict[str, Any] = {"k0": Kernel(graph, "in_ptr0", "out_ptr0")}
    log = LaunchLog(graph.count, None, device_type="cpu")
    with log.noting(module):
        module["k0"].run(whole[4:8], whole.new_zeros(4), stream=0)
    assert log.logged[-1].launch.reads[0] == extent(whole)


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

    def run() -> torch.Tensor:
        graph.nodes += 1
        return torch.relu(a)

    with log.noting(operators=False):
        log.operator(torch.ops.aten.relu.out, (a,), {"out": out}, run)
    (logged,) = log.logged
    assert logged.launch.name == "aten.relu.out"
    assert extent(out) in logged.launch.writes


def test_partial_result_counts_with_its_padding(graph: Graph) -> None:
    padded = torch.zeros(4, 8)
    log = LaunchLog(graph.count, device_type="cpu")

    def attention() -> torch.Tensor:
        graph.nodes += 1
        return padded[:, :5]

    with log.noting({}):
        log.note("aten.attention", attention, [], [], is_operator=True)
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
    def run() -> torch.Tensor:
        graph.nodes += 1
        return zeros

    zeros = torch._efficientzerotensor((4,))
    log = LaunchLog(graph.count, device_type="cpu")
    with log.noting({}):
        log.operator(torch.ops.aten.add.Tensor, (zeros, zeros), {}, run)
    assert log.failure is None
    assert (log.logged[0].launch.reads, log.logged[0].launch.writes) == ((), ())


def test_passed_view_counts_with_its_whole_storage(graph: Graph) -> None:
    whole = torch.zeros(16)
    module: dict[str, Any] = {"k0": Kernel(graph, "in_ptr0", "out_ptr0")}
    log = LaunchLog(graph.count, [whole[4:8]], device_type="cpu")
    with log.noting(module):
        module["k0"].run(whole[4:8], whole.new_zeros(4), stream=0)
    assert log.logged[-1].launch.reads[0] == extent(whole)


def test_freed_memory_is_kept_up_to_the_limit(graph: Graph) -> None:
    module: dict[str, Any] = {"k0": Kernel(graph, "out_ptr0")}
    log = LaunchLog(graph.count, keep_bytes=400, device_type="cpu")
    with log.noting(module):
        for _ in range(20):
            module["k0"].run(torch.zeros(10), stream=0)
            module["k0"].run(torch.zeros(100), stream=0)
    assert log.kept_bytes == 400


@pytest.mark.parametrize("is_large", [True, False])
def test_memory_of_large_segments_is_not_kept(graph: Graph, is_large: bool) -> None:
    made = torch.zeros(10)
    module: dict[str, Any] = {"k0": Kernel(graph, "out_ptr0")}
    log = LaunchLog(
        graph.count, keep_bytes=400, device_type="cpu",
        may_be_kept=lambda address: address == made.data_ptr() and not is_large,
    )  # fmt: skip
    with log.noting(module):
        module["k0"].run(made, stream=0)
        module["k0"].run(torch.zeros(10), stream=0)
    assert log.kept_bytes == (0 if is_large else 40)


def test_workspace_of_an_operator_is_measured(graph: Graph) -> None:
    allocated = iter(range(0, 1 << 20, 256))
    log = LaunchLog(graph.count, allocated_bytes=lambda: next(allocated), keep_bytes=1 << 16, device_type="cpu")
    made = torch.zeros(16)

    def run() -> torch.Tensor:
        graph.nodes += 1
        return made

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


def test_declared_addresses_add_no_memory() -> None:
    assert hidden((0x1000, 0x2010, 7, 0xFF0000), ()).writes == ((0x2000, 0x2100),)


def test_hidden_workspace_excludes_live_tensors() -> None:
    live = ((0x1000, 0x1100), (0x2000, 0x2100), (0x4000, 0x4100))
    assert hidden((RESULT, 0x3000), live).writes == ((0x2000, 0x2100), (0x2100, 0x4000))


def test_hidden_workspace_is_bounded_by_its_allocation() -> None:
    live = ((0x2000, 0x2100), (0x4000, 0x4100))
    assert (0x2F00, 0x3100) in hidden((RESULT, 0x3000), live, own_bytes=0x100).writes


def test_workspace_may_exceed_a_later_block_at_its_address() -> None:
    live = ((0x2000, 0x2100), (0x8000, 0x8100))
    later = ((0x6000, 0x6100), (0x6100, 0x6200))
    assert (0x5E00, 0x6200) in hidden((RESULT, 0x6000), live, later, own_bytes=0x200).writes
    assert (0x2100, 0x8000) in hidden((RESULT, 0x6000), live, later).writes


def test_unfreed_workspace_is_its_block() -> None:
    assert (0x6000, 0x7000) in hidden((RESULT, 0x6800), (), ((0x6000, 0x7000),), own_bytes=0).writes


def test_scratch_of_a_triton_kernel_counts_as_the_segment(graph: Graph) -> None:
    """Triton frees it after the launch, so a smaller block may be at its address when the capture ends."""
    module: dict[str, Any] = {"k0": Kernel(graph, "out_ptr0")}
    log = LaunchLog(graph.count, allocated_bytes=lambda: 0, device_type="cpu")
    out = torch.zeros(4)
    with log.noting(module):
        module["k0"].run(out, stream=0)
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

    def run() -> torch.Tensor:
        graph.nodes += 1
        return given[0]

    with log.noting({}):
        for _ in range(3):
            log.note("aten.add_.Tensor", run, given, given[:1], is_operator=True)
    assert [len(one.live) for one in log.logged] == [3, 0, 0]
    assert [one.own_bytes for one in log.logged] == [256, 256, 256]


def test_live_tensor_that_was_not_passed_counts() -> None:
    assert (0x4000, 0x4100) in hidden((RESULT, 0x4010), ((0x4000, 0x4100),)).reads


def test_address_in_an_input_not_passed_counts() -> None:
    launch = Launch("aten.mm.out", 0, writes=((0x2000, 0x2100),))
    graph = CapturedGraph(nodes=(kernel_node(0x2000, 0xA010),), edges=())
    (found,) = with_hidden_memory([Logged(launch, True)], graph, POOL, (), [(0xA000, 0xB000)])
    assert (0xA000, 0xB000) in found.reads and (0xA000, 0xB000) in found.writes


def test_kernel_without_a_known_address_is_a_barrier() -> None:
    nodes = kernel_node(RESULT), kernel_node(7, 0xFF0000)
    launch = Launch("aten.mm.out", 0, 2, writes=((RESULT, 0x2100),))
    (found,) = with_hidden_memory([Logged(launch, True)], CapturedGraph(nodes=nodes, edges=()), POOL, ())
    assert "no parameter of gemm is a known address" in str(found.barrier)


def test_tensor_map_with_a_plain_address_is_no_barrier() -> None:
    assert operator_with_map(make_tensor_map).barrier is None


def test_tensor_map_of_unknown_encoding_is_a_barrier() -> None:
    assert "address of a result" in str(operator_with_map(make_hidden_map).barrier)


def operator_with_map(make: Callable[[int], bytes]) -> Launch:
    """An operator whose kernel gets its input as an address, and its result in a tensor map."""
    data = (0x1000).to_bytes(8, "little") + make(0x2000)
    node = kernel_node().model_copy(update={"parameters": (Parameter(offset=0, size=len(data), data=data),)})
    launch = Launch("aten.mm.out", 0, reads=((0x1000, 0x1100),), writes=((0x2000, 0x2100),))
    return with_hidden_memory([Logged(launch, True)], CapturedGraph(nodes=(node,), edges=()), POOL, ())[0]


@pytest.mark.parametrize(
    "node",
    [ChildGraphNode(graph=CapturedGraph(nodes=(), edges=())), OtherNode(type_name="HOST")],
    ids=str,
)
def test_node_that_cannot_be_read_is_a_barrier(node: Any) -> None:
    launch = Launch("aten.mm.out", 0, writes=((0x2000, 0x2100),))
    (found,) = with_hidden_memory([Logged(launch, True)], CapturedGraph(nodes=(node,), edges=()), POOL, ())
    assert "a node of it is of the kind" in str(found.barrier)


def test_users_kernel_is_a_barrier_despite_argument_names(graph: Graph) -> None:
    kernel = Kernel(graph, "in_ptr", "out_ptr")
    kernel.custom_kernel = True
    log = LaunchLog(graph.count, device_type="cpu")
    module: dict[str, Any] = {"twice": kernel}
    with log.noting(module):
        module["twice"].run(torch.zeros(2), torch.zeros(2), stream=0)
    (logged,) = log.logged
    assert "does not name" in str(logged.launch.barrier)


def test_error_in_the_function_restores_its_kernels(graph: Graph) -> None:
    kernel = Kernel(graph, "out_ptr0")
    log = LaunchLog(graph.count, device_type="cpu")
    module: dict[str, Any] = {"k0": kernel}
    with pytest.raises(ValueError, match="of the program"), log.noting(module):
        raise ValueError("of the program")
    assert module["k0"] is kernel
    assert not log.is_noted()


def test_copy_from_the_host_is_a_barrier() -> None:
    copy = MemcpyNode(
        source=MemcpyEnd(memory="host", address=1), destination=MemcpyEnd(memory="device", address=2),
        width_bytes=4, height=1, depth=1,
    )  # fmt: skip
    logged = [Logged(Launch("aten.copy_", 0), True)]
    found = with_hidden_memory(logged, CapturedGraph(nodes=(copy,), edges=()), POOL, ())
    assert "copies between" in str(found[0].barrier)


def moving_inputs(graph: Graph, *, writes_moving: bool, writes_fixed: bool) -> tuple[tuple[int, ...], ...]:
    """Launch 0 reads a moving input, 1 a fixed one, 2 writes a moving or a fixed one, or neither."""
    moving, other, fixed, statistics = (torch.zeros(8) for _ in range(4))
    module: dict[str, Any] = {"k0": Kernel(graph, "in_ptr0", "out_ptr0")}
    log = LaunchLog(graph.count, [moving, other, fixed, statistics], [moving, other], device_type="cpu")
    results = [torch.zeros(8) for _ in range(3)]
    with log.noting(module):
        module["k0"].run(moving, results[0], stream=0)
        module["k0"].run(fixed, results[1], stream=0)
        module["k0"].run(results[2], other if writes_moving else statistics if writes_fixed else results[2], stream=0)
    launches = [one.launch for one in log.logged]
    return order_launches(with_moving_inputs(log.logged, launches, log.inputs)).waits_for


def test_read_only_inputs_add_no_dependencies(graph: Graph) -> None:
    assert moving_inputs(graph, writes_moving=False, writes_fixed=False) == ((), (), ())


def test_written_moving_input_waits_for_all_that_read_inputs(graph: Graph) -> None:
    assert moving_inputs(graph, writes_moving=True, writes_fixed=False) == ((), (), (0, 1))


def test_written_fixed_input_waits_for_readers_of_moving_ones(graph: Graph) -> None:
    assert moving_inputs(graph, writes_moving=False, writes_fixed=True) == ((), (), (0,))


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
