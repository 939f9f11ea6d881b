"""A captured step reads inputs of known kernels in place, and copies them where a use is uncertain."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as real
from simulated_gpu.driver import Function, Node, SimulatedDriver, SimulatedGraph, floats, word
from simulated_gpu.operators import CpuDevice, copied
from synthetic_captures import kernel as synthetic_kernel
from torch import nn

from optimizations import torch_internals
from optimizations.capture.device import host_pointers
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.launches import Launches
from optimizations.concurrency.launch_log import Logged
from optimizations.concurrency.order import Launch
from optimizations.graph.driver import CudaCallFailed
from optimizations.graph.read import read_graph
from optimizations.graph.records import MemoryRange

__all__ = ["copied"]

Hidden = contextlib.nullcontext[CpuDevice | None]
NOWHERE: Hidden = contextlib.nullcontext(None)
"""What a kernel holds of a device: nothing, so that it runs at once."""


def on(device: CpuDevice) -> Hidden:
    """Hold state for a kernel of a step on `device` in an object that no step inspects."""
    return contextlib.nullcontext(device)


ROWS, COLUMNS = 16, 8
COUNT = ROWS * COLUMNS


class Kernel:
    """Write the doubled values at the first address to the second. `device` captures it as a node with these
    arguments."""

    def __init__(self, device: Hidden, name: str) -> None:
        self._device, self._name = device, name

    def __str__(self) -> str:
        return self._name

    def __call__(self, source: int, target: int, *others: int) -> list[torch.Tensor]:
        values = list(floats(source, COUNT))
        floats(target, COUNT)[:] = [2 * value for value in values]
        return []

    def launch(self, source: torch.Tensor, target: torch.Tensor, *others: Any) -> None:
        words = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in (source, target, *others)]
        device = self._device.enter_result
        graph = device.capturing_into if device is not None else None
        if graph is None:
            self(*words)
        else:
            graph.operators.append((self, tuple(words), {}, []))


def tuned(kernel: Kernel) -> Any:
    """Launch as Inductor's generated code does: `kernel.run(source, target, stream=...)`."""
    found: Any = object.__new__(torch_internals.CachingAutotuner)  # type: ignore[call-overload]

    def launcher(*arguments: Any, stream: int) -> None:
        kernel.launch(*arguments)

    launcher.config = SimpleNamespace(found_by_coordesc=True)  # type: ignore[attr-defined]
    launcher.store_cubin = False  # type: ignore[attr-defined]
    found.fn = SimpleNamespace(__name__=str(kernel), arg_names=["in_ptr0", "out_ptr0"])
    found.launchers, found.inductor_meta, found.triton_interpret = [launcher], {}, False
    found.dump_launch_params = found.dump_launch_tensors = False
    found.triton_meta, found.mutated_arg_names, found.custom_kernel = {"signature": {}}, [], False
    return found


@pytest.fixture(autouse=True)
def generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove generated modules after each test."""
    monkeypatch.setattr(torch_internals.PyCodeCache, "modules", [])


def launching(kernel: Kernel) -> Callable[..., None]:
    """Run what a function of a generated module with this kernel does."""
    module = SimpleNamespace(kernel=tuned(kernel))
    modules: list[Any] = torch_internals.PyCodeCache.modules
    modules.append(module)

    def run(*arguments: Any, stream: int) -> None:
        module.kernel.run(*arguments, stream=stream)

    return run


AT_THE_RECORDING = [2]
TARGETS_AND_RESULT = [1, 1]
"""Both placeholders are filled before the capture."""

Use = Callable[[Any, Kernel, torch.Tensor, torch.Tensor], Any]
"""What a step does with its kernel, launched by Inductor or by itself, an input and memory for a result."""


def by_name(run: Any, kernel: Kernel, x: torch.Tensor, out: torch.Tensor) -> None:
    run(x, out, stream=0)


def training(device: Hidden, use: Use = by_name) -> Callable[..., Any]:
    torch.manual_seed(7)
    model = nn.Linear(COLUMNS, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kernel = Kernel(device, "triton_double")
    launch = launching(kernel)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        out = torch.empty(ROWS, COLUMNS)
        use(launch, kernel, x, out)
        loss = nn.functional.cross_entropy(model(out), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def calls(count: int = 9) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    return [
        (torch.randn(ROWS, COLUMNS, generator=generator), torch.randint(4, (ROWS,), generator=generator))
        for _ in range(count)
    ]


def as_eager(device: CpuDevice, given: list[tuple[torch.Tensor, torch.Tensor]], use: Use = by_name) -> GraphedStep:
    """Return a step after these calls, whose losses are those of eager."""
    eager = training(NOWHERE, use)
    expected = [eager(*one) for one in given]
    step = GraphedStep(training(on(device), use), device=device)
    assert all(map(torch.equal, [step(*one) for one in given], expected))
    return step


def run(use: Use, given: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[GraphedStep, CpuDevice]:
    """A step on these calls, all of which but the first are replayed."""
    device = CpuDevice()
    report = (step := as_eager(device, given, use)).report()
    assert report.refusals == () and report.replays == len(given) - 3
    return step, device


def followed(step: GraphedStep) -> tuple[int, int]:
    (recording,) = step.report().recordings
    return recording.tensors_followed, recording.copied_tensors


def test_input_of_known_kernels_is_read_in_place(copied: list[int]) -> None:
    step, device = run(by_name, calls())
    assert followed(step) == (1, 1)  # the targets go to an operator, and are copied
    assert device.set_nodes == 6 and copied == [*AT_THE_RECORDING, *TARGETS_AND_RESULT * 6]
    (recording,) = step.report().recordings
    assert recording.copied_bytes == 8 * ROWS
    assert recording.pointer_bytes == 6 * 8  # an address for each node that was set
    (only,) = step._recorder.recordings.tried
    assert not only.inputs.recording_inputs[0].untyped_storage().nbytes()  # nothing was copied there since it was freed
    assert torch.equal(only.inputs.recording_inputs[1], calls()[8][1])


def test_unaligned_input_is_copied_for_that_call(copied: list[int]) -> None:
    given = calls()
    shifted = torch.empty(COUNT + 1)[1:].view(ROWS, COLUMNS).copy_(given[6][0])
    assert shifted.data_ptr() % 16
    given[6] = shifted, given[6][1]
    step, _ = run(by_name, given)
    assert followed(step) == (1, 1)
    assert copied == [*AT_THE_RECORDING, *TARGETS_AND_RESULT * 6, 1]
    (recording,) = step._recorder.recordings.tried
    assert torch.equal(recording.inputs.recording_inputs[0], given[6][0])  # it had no memory before


def test_placeholder_referenced_by_the_program_keeps_memory(copied: list[int]) -> None:
    """The program may have stored it where no step looks, and a read of freed memory would end the process."""
    hidden: Any = contextlib.nullcontext([])

    def holding(run: Any, kernel: Kernel, x: torch.Tensor, out: torch.Tensor) -> None:
        hidden.enter_result.append(x.detach())
        by_name(run, kernel, x, out)

    step, device = run(holding, calls(5))
    assert device.captures == 1
    (recording,) = step._recorder.recordings.tried
    assert recording.inputs.followed == [0]
    lies = recording.inputs.recording_inputs[0]
    assert lies.untyped_storage().nbytes() == 4 * COUNT
    assert any(one.data_ptr() == lies.data_ptr() for one in hidden.enter_result)


def test_unmoved_input_is_not_patched_and_placeholder_is_filled(
    copied: list[int],
) -> None:
    eager, device = training(NOWHERE), CpuDevice()
    step = GraphedStep(training(on(device)), device=device)
    kernel_alone = lambda step: lambda x: step(x, target)  # noqa: E731
    target = calls()[0][1]
    mine, theirs = kernel_alone(step), kernel_alone(eager)
    places = [one[0] for one in calls(5)]
    for x in places:
        assert torch.equal(mine(x), theirs(x))
    (recording,) = step._recorder.recordings.tried
    assert recording.inputs.followed == [0] and recording.inputs.copied_tensors == 0
    shifted = torch.full((COUNT + 1,), 0.5)[1:].view(ROWS, COLUMNS)
    for x, copies in ((places[0], 0), (shifted, 1), (places[0], 0)):
        for _ in range(3):
            copied.clear()
            x.add_(1)
            assert torch.equal(mine(x), theirs(x))
            assert copied == [1] * (copies + 1), "and the result"
        sets = device.set_nodes
        assert torch.equal(mine(x), theirs(x)) and device.set_nodes == sets


def test_input_in_graph_memory_is_copied_for_that_call(copied: list[int]) -> None:
    given, device = calls(), CpuDevice()
    step = GraphedStep(training(on(device)), device=device)
    for one in given[:5]:
        step(*one)
    (recording,) = step._recorder.recordings.tried
    inside = next(one for one in device.graphs[0].made.values() if one.nbytes() == 4 * COUNT)
    x = torch.tensor([]).set_(inside).view(ROWS, COLUMNS)
    eager = training(NOWHERE)
    for one in given[:5]:
        eager(*one)
    x.copy_(given[5][0])
    assert torch.equal(step(x, given[5][1]), eager(*given[5]))
    assert copied == [*AT_THE_RECORDING, *TARGETS_AND_RESULT * 3, 1]
    assert recording.replays == 3


def and_an_operator(run: Any, kernel: Kernel, x: torch.Tensor, out: torch.Tensor) -> None:
    run(x, out, stream=0)
    out.add_(x)


def a_view_to_an_operator(run: Any, kernel: Kernel, x: torch.Tensor, out: torch.Tensor) -> None:
    run(x, out, stream=0)
    out[1:].add_(x[1:])


ROW_NUMBERS = torch.arange(ROWS)[None]


def inside_of_a_sparse_tensor(run: Any, kernel: Kernel, x: torch.Tensor, out: torch.Tensor) -> None:
    run(x, out, stream=0)
    out.add_(torch.sparse_coo_tensor(ROW_NUMBERS, x, x.shape, is_coalesced=True, check_invariants=False))


def by_itself(run: Any, kernel: Kernel, x: torch.Tensor, out: torch.Tensor) -> None:
    kernel.launch(x, out)


def by_name_and_by_itself(run: Any, kernel: Kernel, x: torch.Tensor, out: torch.Tensor) -> None:
    run(x, out, stream=0)
    kernel.launch(x, out)


def a_kernel_of_its_own_elsewhere(run: Any, kernel: Kernel, x: torch.Tensor, out: torch.Tensor) -> None:
    """Its memory could hold any address."""
    kernel.launch(out.clone(), out)
    run(x, out, stream=0)


def an_address_as_a_number(run: Any, kernel: Kernel, x: torch.Tensor, out: torch.Tensor) -> None:
    run(x, out, x.data_ptr() + 64, stream=0)


def an_address_for_an_operator(run: Any, kernel: Kernel, x: torch.Tensor, out: torch.Tensor) -> None:
    """A table of addresses, as a kernel for several products of matrices takes one."""
    table = torch.empty(1, dtype=torch.int64).fill_(x.data_ptr() + 64)
    run(x, out, table, stream=0)


def a_part_of_it(run: Any, kernel: Kernel, x: torch.Tensor, out: torch.Tensor) -> None:
    run(x, out, stream=0)
    run(x, out, x[1:], stream=0)


def many_kernels(run: Any, kernel: Kernel, x: torch.Tensor, out: torch.Tensor) -> None:
    for _ in range(5):
        run(x, out, stream=0)


@torch.library.custom_op("encore_tests::keeps_addresses", mutates_args={"out"})
def keeps_addresses(out: torch.Tensor) -> None:
    out.add_(1)


def an_operator_of_its_own(run: Any, kernel: Kernel, x: torch.Tensor, out: torch.Tensor) -> None:
    """It gets other arguments, but may have stored addresses earlier."""
    run(x, out, stream=0)
    keeps_addresses(out)


@pytest.mark.parametrize(
    "use",
    [
        and_an_operator,
        a_view_to_an_operator,
        inside_of_a_sparse_tensor,
        by_itself,
        by_name_and_by_itself,
        a_kernel_of_its_own_elsewhere,
        an_address_as_a_number,
        a_part_of_it,
        many_kernels,
        an_operator_of_its_own,
    ],
)
def test_input_with_an_uncertain_use_is_copied(use: Use) -> None:
    step, device = run(use, calls())
    assert followed(step) == (0, 2)
    assert device.set_nodes == 0


def left_in_grad(parameter: nn.Parameter, x: torch.Tensor) -> None:
    parameter.grad = x


def left_by_a_backward(parameter: nn.Parameter, x: torch.Tensor) -> None:
    """Autograd stores the tensor itself as the gradient if there is no other reference to it."""
    parameter.grad = None
    parameter.view(-1).backward(x.view(-1))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("leaves", [left_in_grad, left_by_a_backward])
def test_input_stored_as_a_gradient_is_copied(leaves: Callable[[nn.Parameter, torch.Tensor], None]) -> None:
    def program(device: Hidden) -> tuple[Callable[[torch.Tensor], torch.Tensor], nn.Parameter]:
        parameter, launch = nn.Parameter(torch.ones(ROWS, COLUMNS)), launching(Kernel(device, "triton_double"))

        def step(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty(ROWS, COLUMNS)
            launch(x, out, stream=0)
            leaves(parameter, x)
            return out.sum()

        return step, parameter

    device = CpuDevice()
    (eager, expected), (captured, found) = program(NOWHERE), program(on(device))
    step = GraphedStep(captured, device=device)
    for x, _ in calls():
        assert torch.equal(step(x), eager(x))
        assert found.grad is not None and expected.grad is not None and torch.equal(found.grad, expected.grad)
    assert step.report().replays == 6 and followed(step) == (0, 1)


def test_input_of_a_result_copied_after_a_launch_is_copied() -> None:
    def program(device: Hidden) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        launch = launching(Kernel(device, "triton_double"))

        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = torch.empty(ROWS, COLUMNS)
            launch(x, out, stream=0)
            return out.sum(), torch.from_dlpack(x[:, 1:])

        return step

    device = CpuDevice()
    eager, step = program(NOWHERE), GraphedStep(program(on(device)), device=device)
    for x, _ in calls():
        for found, expected in zip(step(x), eager(x), strict=True):
            assert torch.equal(found, expected)
    assert step.report().replays == 6 and followed(step) == (0, 1)


def test_pointer_past_its_tensor_is_found_before_recording() -> None:
    with pytest.warns(UserWarning, match="differs in two calls with equal shapes: one ran fill_"):
        assert as_eager(CpuDevice(), calls(), an_address_for_an_operator).report().replays == 0


@pytest.mark.parametrize("of_the_kernel", [False, True])
def test_memory_before_operator_arguments_is_not_evidence(of_the_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Structures that PyTorch leaves unset hold stale addresses. Further arguments of Inductor's kernels are
    uncertain."""
    device = CpuDevice()
    stock = device.read

    def read(graph: Any) -> Any:
        captured = stock(graph)
        (source,) = [node.parameters[0] for node in captured.nodes if node.name == "triton_double"]
        garbage = struct.pack("<QQ", 1, int.from_bytes(source.data, "little") + 64)
        nodes = [*captured.nodes]
        for index, node in enumerate(nodes):
            if (node.name == "triton_double") is of_the_kernel:
                parameters = [one.data for one in node.parameters]
                nodes[index] = synthetic_kernel([*parameters, garbage], name=node.name)
        return captured.model_copy(update={"nodes": tuple(nodes)})

    monkeypatch.setattr(device, "read", read)
    assert followed(as_eager(device, calls())) == ((0, 2) if of_the_kernel else (1, 1))


def test_input_read_by_several_kernels_is_patched_in_each() -> None:
    def use(run: Any, kernel: Kernel, x: torch.Tensor, out: torch.Tensor) -> None:
        run(x, out, stream=0)
        out.mul_(0.5)
        other = torch.empty_like(out)
        run(x, other, stream=0)
        out.add_(other)

    step, device = run(use, calls())
    assert followed(step) == (1, 1)
    assert device.set_nodes == 2 * 6


def test_unsettable_node_is_recorded_with_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()
    stock = device.pointers

    def pointers(*arguments: Any) -> Any:
        point, done = stock(*arguments).point, iter(range(3))

        def failing(addresses: Any) -> int:
            if next(done, None) is None:
                raise CudaCallFailed("cuGraphExecKernelNodeSetParams", None, "refused")
            return point(addresses)

        return SimpleNamespace(point=failing, settle=lambda: None)

    monkeypatch.setattr(device, "pointers", pointers)
    step = as_eager(device, calls(12))
    assert (step.report().dropped_recordings, step.report().replays) == (1, 12 - 3)
    assert followed(step) == (0, 2)


@pytest.mark.parametrize("call", ["node_count", "read", "pointers"])
def test_driver_error_disables_only_in_place_reading(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()

    def fails(*arguments: Any) -> Any:
        raise CudaCallFailed("cuGraphGetNodes", None, "refused")

    monkeypatch.setattr(device, call, fails)
    step = as_eager(device, calls())
    assert step.report().refusals == () and followed(step) == (0, 2)


# The driver's side.


@pytest.fixture
def memory() -> Iterator[Callable[[float], torch.Tensor]]:
    yield lambda value: torch.full((COUNT,), value, dtype=torch.float32)


def test_driver_reads_moved_inputs_in_place_without_a_copy(memory: Callable[[float], torch.Tensor]) -> None:
    driver = SimulatedDriver()
    second, placeholder, out = memory(2), memory(0), memory(0)

    def double(source: bytes, target: bytes) -> None:
        Kernel(NOWHERE, "")(int.from_bytes(source, "little"), int.from_bytes(target, "little"))

    function = Function("triton_double", (8, 8), double)
    driver.add_function(function)
    handle = driver.new_graph()
    parameters = [word(placeholder.data_ptr()), word(out.data_ptr())]
    driver.add_node(handle, Node("KERNEL", function, parameters))
    graph: Any = SimulatedGraph(driver, handle)
    graph.instantiate()
    launches = Launches()
    passed = ((placeholder.data_ptr(), placeholder.data_ptr()),)
    launches.kernels.append(Logged(Launch("triton_double", 0), is_operator=False, passed=passed))
    captured = read_graph(driver, real.CUgraph(handle))
    where = {0: MemoryRange(address=placeholder.data_ptr(), size_bytes=placeholder.nbytes)}
    plan = launches.plan(captured, where)
    (planned,) = plan.inputs
    assert planned.indirect and planned.alignment_bytes == 16

    point = host_pointers(driver, graph, captured, plan).point
    ctypes.memset(placeholder.data_ptr(), 0, placeholder.nbytes)
    assert point({0: second.data_ptr()}) == 8
    graph.replay()
    assert out.tolist() == [4.0] * COUNT and not placeholder.any()
    driver.check_node_memory()
