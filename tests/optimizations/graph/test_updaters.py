"""Updaters of kernel nodes write addresses into a graph's nodes, and take as much memory as they say."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda.bindings import driver as real
from fake_tensor_map import make_tensor_map, replace_address
from simulated_gpu.driver import Function, Node, SimulatedDriver, SimulatedGraph, SimulatedTools, floats, word
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import Compiled, Model, check, values

from optimizations.graph.applied import AppliedPlan
from optimizations.graph.device import DeviceTools
from optimizations.graph.driver import KernelUnavailable
from optimizations.graph.editing import EditableGraph
from optimizations.graph.host import HostUpdates
from optimizations.graph.plan import Available, Choice, Plan, Slot, make_plan
from optimizations.graph.pointers import Analysis, InputVerdict, PointerUse, UseKind
from optimizations.graph.read import read_graph
from optimizations.graph.table import (
    CAPACITIES,
    WORDS_PER_NODE,
    PointerTable,
    build_table_kernel,
)
from optimizations.graph.tensor_map import AddressRefused
from optimizations.trees.containers import managers

COUNT = 8


def double(source: bytes, destination: bytes, count: bytes) -> None:
    """destination = 2 * source."""
    size = int.from_bytes(count, "little")
    values = list(floats(int.from_bytes(source, "little"), size))
    floats(int.from_bytes(destination, "little"), size)[:] = [2 * value for value in values]


def add(first: bytes, second: bytes, destination: bytes, count: bytes) -> None:
    """destination = first + second."""
    size = int.from_bytes(count, "little")
    one, other = (list(floats(int.from_bytes(pointer, "little"), size)) for pointer in (first, second))
    floats(int.from_bytes(destination, "little"), size)[:] = [a + b for a, b in zip(one, other, strict=True)]


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor([*values, *[0.0] * (COUNT - len(values))])


class Program:
    """out = 2 * x; total = out + y[2:]; copied = y; filled = 7s, with x as input 0 and y as input 1."""

    def __init__(self) -> None:
        self.driver = driver = SimulatedDriver()
        self.x, self.y = tensor(1, 2, 3), tensor(10, 20, 30, 40)
        self.out, self.total, self.copied = tensor(), torch.zeros(COUNT - 2), tensor()
        doubling, adding = Function("double", (8, 8, 4), double), Function("add", (8, 8, 8, 4), add)
        driver.add_function(doubling)
        driver.add_function(adding)
        self.graph = driver.new_graph()
        x, y, out, total, copied = (one.data_ptr() for one in (self.x, self.y, self.out, self.total, self.copied))
        first = Node("KERNEL", doubling, [word(x), word(out), COUNT.to_bytes(4, "little")], (3, 2, 1))
        second = [word(out), word(y + DELTA), word(total), (COUNT - 2).to_bytes(4, "little")]
        driver.add_node(self.graph, Node("KERNEL", adding, second), after=[driver.add_node(self.graph, first)])
        driver.add_node(self.graph, Node("MEMCPY", copy={"source": y, "destination": copied, "bytes": COUNT * 4}))

    def results(self) -> list[torch.Tensor]:
        return [self.out.clone(), self.total.clone(), self.copied.clone()]

    @staticmethod
    def expected(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        total = 2 * x
        total[: COUNT - 2] += y[2:]
        return [2 * x, total[: COUNT - 2], y]


DELTA = 2 * 4


@pytest.fixture
def program() -> Program:
    return Program()


ALL = Available()

USES = (
    PointerUse(0, 0, 0, 0, 0),
    PointerUse(1, 1, 0, 1, DELTA),
    PointerUse(2, 0, 0, 1, 0, UseKind.MEMCPY_SOURCE),
)


def analysis_of(*uses: PointerUse) -> Analysis:
    inputs = sorted({use.input for use in uses})
    return Analysis(
        tuple(InputVerdict(index, tuple(use for use in uses if use.input == index), ()) for index in inputs), ()
    )


def apply(
    driver: SimulatedDriver, graph: int, choice: Choice, *uses: PointerUse, replace: Any = None
) -> tuple[AppliedPlan, Any]:
    """Plan these uses of inputs (by default the program's), and return the applied plan and the graph to replay."""
    raw, tools = real.CUgraph(graph), SimulatedTools(driver, replace)
    captured = read_graph(driver, raw)
    plan: Plan = make_plan(captured, analysis_of(*(uses or USES)), choice, ALL)
    applied = AppliedPlan(EditableGraph.of(driver, raw, captured), plan, tools)
    run = SimulatedGraph(driver, graph)
    run.instantiate()
    applied.instantiated(real.CUgraphExec(run.raw_cuda_graph_exec()), tools.stream())
    return applied, run


NODES = {Choice.HOST: (3, 0), Choice.PRELUDE: (1, 2)}
"""How many nodes the host and the prelude update."""


# All choices: one that is added, as `docs/extending.md` does, is tested with these.
@pytest.mark.parametrize(
    "choice", [one for one in Choice if one not in (Choice.OFF, Choice.AUTO)], ids=lambda one: one.value
)
def test_graph_reads_its_moved_inputs(program: Program, choice: Choice) -> None:
    """Move one input or both several times; their old memory is poisoned."""
    captured = read_graph(program.driver, real.CUgraph(program.graph))
    plan = make_plan(captured, analysis_of(*USES), choice, ALL)
    nodes = len(plan.of(Choice.HOST)), len(plan.of(Choice.PRELUDE))
    assert nodes == NODES.get(choice, nodes)
    applied, graph = apply(program.driver, program.graph, choice)
    at = {0: program.x.data_ptr(), 1: program.y.data_ptr()}
    applied.point(at)
    graph.replay()
    expected = program.expected(program.x, program.y)
    assert all(map(torch.equal, program.results(), expected))
    current = {0: program.x.clone(), 1: program.y.clone()}
    applied.point({index: one.data_ptr() for index, one in current.items()})
    old = []
    for step, moving in enumerate([(0, 1), (0,), (1,), (0, 1)]):
        moved = {index: tensor(*(step + 3.0 * index + place for place in range(COUNT))) for index in moving}
        old.append(current)
        current = current | moved
        applied.point({index: one.data_ptr() for index, one in moved.items()})
        for memory in (program.x, program.y, *(old[-1][index] for index in moving)):
            memory.fill_(float("nan"))
        graph.replay()
        assert all(map(torch.equal, program.results(), program.expected(current[0], current[1]))), step
    program.driver.check_node_memory()
    assert applied.failure() is None


def test_fill_writes_its_moved_destination() -> None:
    driver = SimulatedDriver()
    memory, elsewhere = torch.zeros(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    graph = driver.new_graph()
    driver.add_node(graph, Node("MEMSET", fill={"address": memory.data_ptr() + 4, "bytes": 8}))
    applied, run = apply(driver, graph, Choice.PRELUDE, PointerUse(0, 0, 0, 3, 4, UseKind.MEMSET))
    assert applied.point({3: elsewhere.data_ptr()}) == 8
    run.replay()
    assert elsewhere.tolist() == [0] * 4 + [7] * 8 + [0] * 4
    assert memory.sum() == 0


@pytest.mark.parametrize("choice", [Choice.HOST, Choice.PRELUDE])
def test_tensor_maps_are_made_for_the_new_address(choice: Choice) -> None:
    driver = SimulatedDriver()
    seen: list[bytes] = []
    function = Function("uses_tma", (8, 128), lambda _, window: seen.append(window))
    driver.add_function(function)
    graph = driver.new_graph()
    driver.add_node(graph, Node("KERNEL", function, [word(0), make_tensor_map(0x1000)]))
    use = PointerUse(0, 1, 0, 0, 0x20, UseKind.TENSOR_MAP)
    applied, run = apply(driver, graph, choice, use, replace=replace_address)
    for address in (0x2000, 0x7F00_0000_3000):
        assert applied.point({0: address}) == 128
        run.replay()
        assert seen[-1] == make_tensor_map(address + 0x20)
    with pytest.raises(AddressRefused, match="0x2024"):
        applied.point({0: 0x2004})


def test_prelude_runs_before_the_nodes_it_writes(program: Program) -> None:
    driver = program.driver
    applied, graph = apply(driver, program.graph, Choice.PRELUDE)
    nodes = driver.graphs[program.graph].nodes
    assert [driver.nodes[node].updatable for node in nodes] == [True, True, False, False, False]
    table, prelude = nodes[-2:]
    assert [edge for edge in driver.graphs[program.graph].edges if edge[0] == table] == [(table, prelude)]
    # The second node waits for the first already, and the copy waits for nothing.
    assert [edge for edge in driver.graphs[program.graph].edges if edge[0] == prelude] == [
        (prelude, nodes[0]),
        (prelude, nodes[2]),
    ]
    assert graph.instantiations == 1
    assert "cuGraphUpload" in driver.calls
    driver.calls.clear()
    applied.point({0: program.x.data_ptr()})
    assert driver.calls == ["cuGraphExecKernelNodeSetParams"], "one step, whatever the number of nodes: the table's"


@pytest.mark.parametrize("slots", [1, 3, WORDS_PER_NODE, WORDS_PER_NODE + 1, 1000])
def test_table_is_written_by_few_nodes_and_only_where_it_changed(slots: int) -> None:
    driver = SimulatedDriver()
    graph = driver.new_graph()
    reader = driver.add_node(graph, Node("MEMSET", fill={"address": torch.zeros(1).data_ptr(), "bytes": 0}))
    captured = read_graph(driver, real.CUgraph(graph))
    target = EditableGraph.of(driver, real.CUgraph(graph), captured)
    table = PointerTable(target, [Slot(8 * index, index, index) for index in range(slots)], SimulatedTools(driver))
    target.begin_with([node.handle for node in table.nodes])
    assert len(table.nodes) == -(-slots // WORDS_PER_NODE)
    run = SimulatedGraph(driver, graph)
    run.instantiate()
    updates = HostUpdates(table.nodes, real.CUgraphExec(run.raw_cuda_graph_exec()))
    everything = {index: 0x1000 * (index + 1) for index in range(slots)}
    assert updates.point(everything) == 8 * slots
    run.replay()
    memory = (ctypes.c_uint64 * slots).from_address(table.address)
    assert list(memory) == [0x1000 * (index + 1) + index for index in range(slots)]
    order = driver.executables[run.raw_cuda_graph_exec()].order
    assert order[-1] == reader, "what reads the table runs last"
    driver.calls.clear()
    last = slots - 1
    assert updates.point({last: 0x77}) == 8
    assert updates.point({slots + 5: 0x1}) == 0, "an input without a slot"
    assert driver.calls == ["cuGraphExecKernelNodeSetParams"]
    run.replay()
    assert list(memory) == [0x1000 * (index + 1) + index for index in range(last)] + [0x77 + last]


def test_interrupt_while_the_table_is_disabled_enables_it_again(program: Program) -> None:
    driver = program.driver
    switch, interrupting = driver.cuGraphNodeSetEnabled, [True]

    def interrupted(executable: Any, node: Any, enabled: int) -> tuple[Any, ...]:
        result: tuple[Any, ...] = switch(executable, node, enabled)
        if interrupting.pop():
            raise KeyboardInterrupt
        interrupting.append(False)
        return result

    driver.cuGraphNodeSetEnabled = interrupted
    applied, graph = apply(driver, program.graph, Choice.PRELUDE)
    applied.point({0: program.x.data_ptr(), 1: program.y.data_ptr()})
    graph.replay()
    with pytest.raises(KeyboardInterrupt):
        applied.settle()
    interrupting.append(False)
    x, y = program.x + 1, program.y - 1
    applied.point({0: x.data_ptr(), 1: y.data_ptr()})
    graph.replay()
    assert all(map(torch.equal, program.results(), program.expected(x, y)))


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_table_kernel_compiles(target: str) -> None:
    first, *others = (build_table_kernel(target, capacity) for capacity in CAPACITIES)
    assert first.startswith(b"\x7fELF")
    assert first not in others
    with pytest.raises(KernelUnavailable, match="sm_1"):
        build_table_kernel("sm_1", CAPACITIES[0])


# Pointer tables and memory that preludes read are not reused during a launch that reads them.


WEIGHT = values(7)
STREAM = 12


def in_place(cuda: CudaOnCpu) -> tuple[Compiled, set[int]]:
    """Return a function with a prelude that ran on two streams, and the addresses of its tables."""
    compiled = Compiled(Model(cuda), choice=Choice.PRELUDE)
    check(compiled, WEIGHT, calls=20)
    assert compiled.reports[0].pointer_bytes, compiled.reports
    cuda.tools.read_on.clear()
    cuda.stream = STREAM
    check(compiled, WEIGHT, calls=2)
    (node,) = managers()[0].nodes()
    applied = node.session._applied
    memory = {tensor.data_ptr() for tensor in (*applied._prelude.memory, applied._table.memory)}
    assert len(memory) == 4, "the table, and what the prelude reads"
    return compiled, memory


def leave_pool() -> None:
    managers()[0].leave_pool()


def drop() -> None:
    (manager,) = managers()
    manager._drop(next(manager.nodes()))


@pytest.mark.parametrize("let_go", [leave_pool, drop])
def test_memory_of_the_last_launch_is_recorded_on_its_stream(
    cuda_on_cpu: CudaOnCpu, let_go: Callable[[], None]
) -> None:
    compiled, memory = in_place(cuda_on_cpu)
    let_go()
    assert set(cuda_on_cpu.tools.read_on) == {(address, STREAM) for address in memory}
    check(compiled, WEIGHT, calls=2)


def test_memory_of_a_freed_function_is_recorded_on_its_stream(cuda_on_cpu: CudaOnCpu) -> None:
    compiled, memory = in_place(cuda_on_cpu)
    del compiled
    gc.collect()
    assert set(cuda_on_cpu.tools.read_on) == {(address, STREAM) for address in memory}


def test_each_tensor_is_recorded_on_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []

    class Memory:
        def __init__(self, name: str) -> None:
            self.name = name

        def record_stream(self, stream: Any) -> None:
            told.append((self.name, stream))

    tools = DeviceTools.__new__(DeviceTools)
    tools.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    memory: Any = [Memory("table"), Memory("nodes")]
    tools.still_read(memory, None)
    other: Any = "other"
    tools.still_read(memory, other)
    assert told == [(name, stream) for stream in ("current", "other") for name in ("table", "nodes")]
