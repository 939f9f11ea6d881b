"""Small inputs of a step that one kernel of its graph copies, led to where they lie by one call of the driver."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as real
from simulated_gpu.driver import Function, Node, SimulatedDriver, SimulatedGraph
from simulated_gpu.operators import CpuCopy, CpuDevice, ListCopy, copied, settings
from synthetic_captures import kernel as synthetic_kernel

from optimizations import torch_internals
from optimizations.capture.copy_nodes import MOST_CARRIED, NotCarried
from optimizations.capture.device import host_pointers
from optimizations.capture.fused_copies import MOST_BYTES, find_fused, fused_copies
from optimizations.capture.inputs import CopiedInputs
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.graph.driver import CudaCallFailed
from optimizations.graph.plan import Plan
from optimizations.graph.read import read_graph
from optimizations.graph.records import CapturedGraph, MemoryRange
from optimizations.torch_internals import list_copies
from tests.optimizations.capture.step.test_following import COLUMNS, ROWS, Kernel, generated, launching, on

CALLS = 10
AT_THE_RECORDING = 3
"""So many calls run before the one that is recorded, which is launched at once."""

Batch = list[torch.Tensor]
Make = Callable[[int], Batch]


__all__ = ["copied", "generated", "settings"]
pytestmark = pytest.mark.usefixtures("settings")


def weighed(*batch: torch.Tensor) -> torch.Tensor:
    """Every element of every tensor counts, with a weight that tells it from the others."""
    total = torch.zeros(())
    for index, one in enumerate(batch):
        total = total + (one.to(torch.float32) * torch.arange(1, one.numel() + 1).view(one.shape)).sum() * (index + 1)
    return total


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 9, shape, generator=generator).to(dtype)


def twelve(seed: int) -> Batch:
    """Eight of one type and four of another, in turns."""
    return [numbers(12 * seed + index, 3, 1 + index) for index in range(8)] + [
        numbers(12 * seed + index, 5, dtype=torch.int64) for index in range(8, 12)
    ]


@pytest.fixture(scope="module", autouse=True)
def set_up() -> None:
    """What is set up in the first calls of a process costs one of them."""
    step = GraphedStep(weighed, device=CpuDevice())
    for seed in range(6):
        step(*twelve(seed))


def served(step: Callable[..., Any], batches: Sequence[Batch], device: CpuDevice | None = None) -> GraphedStep:
    """A step on these batches, which are alive at once, with the results of eager."""
    graphed = GraphedStep(step, device=device or CpuDevice())
    for batch in batches:
        expected = step(*[one.clone() for one in batch])
        assert torch.equal(graphed(*batch), expected)
    report = graphed.report()
    assert report.refusals == () and report.replays == len(batches) - AT_THE_RECORDING
    return graphed


def reported(step: GraphedStep) -> tuple[int, int]:
    (recording,) = step.report().recordings
    return recording.copied_tensors, recording.tensors_followed


def test_many_small_tensors_take_one_driver_call_per_type(copied: list[int]) -> None:
    batches, device = [twelve(seed) for seed in range(CALLS)], CpuDevice()
    step = served(weighed, batches[:5], device)
    copied.clear()
    sets, settings = device.set_nodes, CpuCopy.settings
    for batch in batches[5:]:
        assert torch.equal(step(*batch), weighed(*batch))
    assert device.set_nodes - sets == 2 * len(batches[5:])
    assert CpuCopy.settings - settings == len(batches[5:])  # that of the result
    assert copied == []
    (report,) = step.report().recordings
    assert reported(step) == (12, 0) and report.copied_bytes == sum(one.nbytes for one in batches[0])
    assert report.pointer_bytes == 12 * 8 * (CALLS - AT_THE_RECORDING - 1)  # the first launch is where it was recorded


def test_what_did_not_move_is_left_alone() -> None:
    first, second, device = twelve(1), twelve(2), CpuDevice()
    step = served(weighed, [twelve(seed) for seed in range(3, 8)], device)
    step(*first)
    for batch, calls in ((first, 0), ([*first[:3], second[3], *first[4:]], 1), ([*first[:11], second[11]], 2)):
        sets = device.set_nodes
        assert torch.equal(step(*batch), weighed(*batch))
        assert device.set_nodes - sets == calls


def test_what_was_copied_is_what_the_batch_holds_at_the_launch() -> None:
    step, batch = served(weighed, [twelve(seed) for seed in range(5)]), twelve(5)
    for _ in range(3):
        for one in batch:
            one.add_(1)
        assert torch.equal(step(*batch), weighed(*batch))


def alike(seed: int) -> Batch:
    return [numbers(4 * seed + index, 4, 2) for index in range(4)]


def test_input_in_graph_memory_is_copied_before_the_launch(copied: list[int]) -> None:
    device = CpuDevice()
    step = served(weighed, [alike(seed) for seed in range(6)], device)
    inside = next(one for one in device.graphs[0].made.values() if one.nbytes() == 32)
    for where in (1, 2):
        batch = alike(10 + where)
        there = torch.tensor([]).set_(inside).view(4, 2).copy_(batch[where])
        copied.clear()
        assert torch.equal(step(*batch[:where], there, *batch[where + 1 :]), weighed(*batch))
        assert copied == [1]
        copied.clear()
        assert torch.equal(step(*batch), weighed(*batch)) and copied == []


def test_one_that_is_not_aligned_is_copied_before_the_launch(copied: list[int]) -> None:
    step = served(weighed, [alike(seed) for seed in range(6)])
    for shift, copies in ((4, []), (2, [1]), (8, []), (1, [1])):
        batch = alike(30 + shift)
        there = torch.frombuffer(bytearray(64), dtype=torch.float32, offset=shift, count=8).view(4, 2)
        batch[3] = there.copy_(batch[3])
        for _ in range(2):
            copied.clear()
            assert torch.equal(step(*batch), weighed(*batch))
            assert copied == copies


def test_inputs_in_each_others_placeholders_are_copied_at_once() -> None:
    step = served(weighed, [alike(seed) for seed in range(6)])
    (recording,) = step._recordings
    placeholders = recording.inputs.recording_inputs
    for order in ([1, 0, 3, 2], [3, 0, 1, 2], [2, 1, 3, 0]):
        step(*alike(40 + order[0]))
        batch = [placeholders[index] for index in order]
        expected = weighed(*[one.clone() for one in batch])
        assert torch.equal(step(*batch), expected)


def test_inputs_copied_before_the_launch_are_copied_together(copied: list[int]) -> None:
    device = CpuDevice()
    step = served(weighed, [[*alike(seed), *alike(seed)] for seed in range(6)], device)
    inside = next(one for one in device.graphs[0].made.values() if one.nbytes() == 32)
    batch = [*alike(7), *alike(8)]
    there = [torch.tensor([]).set_(inside).view(4, 2), torch.tensor([]).set_(inside).view(4, 2).narrow(0, 0, 4)]
    there[0].copy_(batch[2])
    copied.clear()
    assert torch.equal(step(*batch[:2], *there, *batch[4:]), weighed(*batch[:2], *[batch[2]] * 2, *batch[4:]))
    assert copied == [2]


def test_what_lies_where_no_element_may_is_copied_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As memory: a kernel cannot read it, and a GPU that tries to stops the process."""
    seen: list[torch.Tensor] = []
    stock = torch_internals.foreach_copy_

    def copying(targets: Any, sources: Any, **keywords: Any) -> None:
        seen.extend([*targets, *sources])
        stock(targets, sources, **keywords)

    monkeypatch.setattr(torch_internals, "foreach_copy_", copying)
    odd = [torch.frombuffer(bytearray(64), dtype=torch.float32, offset=at, count=8).view(4, 2) for at in (1, 2, 6)]
    batch = alike(1)
    for one, values in zip(odd, batch, strict=False):
        one.copy_(values)
    inputs = CopiedInputs([*odd, *batch])
    assert all(map(torch.equal, inputs.recording_inputs, [*odd, *batch]))
    inputs.give_back([*batch[:3], odd[0], *batch[1:]], [3, 4, 5])
    assert len(seen) == 2 * 4 + 2 * 2 and not any(one.data_ptr() % 4 for one in seen)


def passed_twice(seed: int) -> Batch:
    first, second, third, _ = alike(seed)
    return [first, second, first, third, second]


def of_one_memory(seed: int) -> Batch:
    """Other tensors in the same place: each has a placeholder of its own."""
    first, second, *_ = alike(seed)
    return [first, first.view(2, 4), second, first[1:]]


def of_other_layouts(seed: int) -> Batch:
    """Expanded, without elements, without dimensions, part of a larger one, in other orders."""
    plain, other, part, column = alike(seed)
    return [
        *(plain, other, column[:1].expand(3, 2), numbers(seed, 0, 3), torch.tensor(float(seed))),
        *(part[1:3], part.T, numbers(seed, 6)[::2], numbers(seed, 1, 3).as_strided((1, 3), (7, 1))),
    ]


@pytest.mark.parametrize(("make", "copies"), [(passed_twice, 3), (of_one_memory, 4), (of_other_layouts, 8)])
def test_inputs_of_any_kind_are_right(make: Make, copies: int) -> None:
    device = CpuDevice()
    step = served(weighed, [make(seed) for seed in range(CALLS)], device)
    assert reported(step) == (copies, 0)
    assert device.set_nodes == CALLS - AT_THE_RECORDING - 1 and device.captures == 1


@pytest.mark.parametrize("kind", sorted(list_copies.WHOLE_NUMBERS, key=str))
def test_each_type_is_copied_bit_by_bit(kind: torch.dtype) -> None:
    def step(*batch: torch.Tensor) -> Batch:
        return [one.view(torch.uint8) + 1 for one in batch]

    device = CpuDevice()
    graphed = GraphedStep(step, device=device)
    for seed in range(6):
        bits = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        batch = [one.view(kind) for one in (bits % 2 if kind is torch.bool else bits)]
        assert all(map(torch.equal, graphed(*batch), step(*batch)))
    assert graphed.report().refusals == () and graphed.report().replays == 3 and device.set_nodes == 2
    assert reported(graphed) == (2, 0)


def test_the_kernel_copies_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes half precision in single precision, where a NaN loses its bits."""
    seen: list[torch.dtype] = []
    stock = torch_internals.foreach_copy_

    def copying(targets: Any, sources: Any, **keywords: Any) -> None:
        seen.extend(one.dtype for one in [*targets, *sources])
        stock(targets, sources, **keywords)

    monkeypatch.setattr(torch_internals, "foreach_copy_", copying)
    sources = [torch.ones(3, dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16)]
    targets = [torch.zeros_like(one) for one in sources]
    list_copies.copy_lists(targets, sources)
    assert seen == [torch.int16] * 4 and all(map(torch.equal, targets, sources))


def test_an_input_that_the_step_writes_is_the_callers() -> None:
    def step(*batch: torch.Tensor) -> torch.Tensor:
        batch[1].mul_(2)
        batch[2].add_(batch[0])
        return weighed(*batch)

    device, graphed = CpuDevice(), None
    graphed = GraphedStep(step, device=device)
    for seed in range(CALLS):
        mine, theirs = alike(seed), alike(seed)
        assert torch.equal(graphed(*mine), step(*theirs))
        assert all(map(torch.equal, mine, theirs))
    assert graphed.report().replays == CALLS - AT_THE_RECORDING and reported(graphed) == (4, 0)
    assert device.set_nodes == CALLS - AT_THE_RECORDING - 1


def test_named_and_copied_inputs_move_together() -> None:
    def training(device: CpuDevice | None) -> Callable[..., torch.Tensor]:
        double = Kernel(on(device) if device is not None else on(CpuDevice()), "triton_double")
        launch = launching(double)

        def step(x: torch.Tensor, *batch: torch.Tensor) -> torch.Tensor:
            out = torch.empty(ROWS, COLUMNS)
            launch(x, out, stream=0)
            return weighed(out, *batch)

        return step

    device = CpuDevice()
    eager, step = training(None), GraphedStep(training(device), device=device)
    kept = []
    for seed in range(CALLS):
        batch = [numbers(seed, ROWS, COLUMNS), *(one.to(torch.int64) for one in alike(seed))]
        kept.append(batch)
        assert torch.equal(step(*batch), eager(*batch))
    assert step.report().refusals == () and reported(step) == (4, 1)
    # The kernel reads its placeholder until the first launch.
    assert device.set_nodes == 2 * (CALLS - AT_THE_RECORDING) - 1


def test_input_of_a_named_kernel_is_copied_with_its_type() -> None:
    def training(device: CpuDevice) -> Callable[..., torch.Tensor]:
        launch = launching(Kernel(on(device), "triton_double"))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out = torch.empty(ROWS, COLUMNS)
            launch(x, out, stream=0)
            return weighed(out, y)

        return step

    device = CpuDevice()
    eager, step = training(CpuDevice()), GraphedStep(training(device), device=device)
    batches = [[numbers(seed, ROWS, COLUMNS), numbers(seed, 3)] for seed in range(CALLS)]
    for batch in batches:
        assert torch.equal(step(*batch), eager(*batch))
    assert reported(step) == (2, 0) and device.set_nodes == CALLS - AT_THE_RECORDING - 1


# What one launch has room for.


@pytest.mark.parametrize(
    ("count", "kernels", "own_nodes"), [(64, 1, 0), (65, 1, 1), (66, 2, 0), (3 * MOST_CARRIED, 1, 0), (1, 0, 1)]
)
def test_tensors_beyond_one_launch_take_several(count: int, kernels: int, own_nodes: int, copied: list[int]) -> None:
    def step(*batch: torch.Tensor) -> torch.Tensor:
        return torch.stack(batch).mul(torch.arange(1, count + 1)[:, None]).sum()

    device, batches = CpuDevice(), [[numbers(seed * count + one, 3) for one in range(count)] for seed in range(6)]
    *before, batch = batches
    graphed = served(step, before, device)
    held = graphed(*before[-1])  # so that the next result lies elsewhere
    sets, settings = device.set_nodes, CpuCopy.settings
    copied.clear()
    assert torch.equal(graphed(*batch), step(*batch))
    del held
    assert device.set_nodes - sets == kernels and copied == []
    assert CpuCopy.settings - settings == own_nodes + 1  # and that of the result
    assert reported(graphed) == (count, 0)


def test_a_large_tensor_has_a_node_of_its_own() -> None:
    elements = MOST_BYTES // 4
    device = CpuDevice()
    make: Make = lambda seed: [*alike(seed), numbers(seed, elements), numbers(seed, elements + 1)]  # noqa: E731
    *before, batch = [make(seed) for seed in range(6)]
    step = served(weighed, before, device)
    sets, settings = device.set_nodes, CpuCopy.settings
    assert torch.equal(step(*batch), weighed(*batch))
    assert (device.set_nodes - sets, CpuCopy.settings - settings) == (1, 2)  # the large one, and the result
    assert reported(step) == (6, 0)


def pairs(batch: Batch) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    return {index: (one, torch.empty_like(one)) for index, one in enumerate(batch)}


def test_each_group_is_one_launch_of_pytorchs_kernel() -> None:
    most = torch.empty(MOST_BYTES, dtype=torch.uint8)  # in 16 parts
    cases: list[tuple[Batch, list[int]]] = [
        ([torch.ones(2)] * 64, [64]),
        ([torch.ones(2)] * 130, [64, 64, 2]),
        ([torch.ones(2)] * 129, [64, 64]),
        ([most] * 20, [20]),
        ([most] * 23, [20, 3]),
        ([*[most] * 19, most[: 65536 * 15 + 1], most[:3], most[:1]], [20, 2]),
        ([*[most] * 3, torch.ones(2), torch.ones(2, dtype=torch.int32), torch.ones(2)], [3, 2]),
        ([torch.ones(1, dtype=torch.complex128)] * 2, []),
    ]
    for batch, sizes in cases:
        found = fused_copies(pairs(batch))
        assert [len(one.indices) for one in found] == sizes
        for one in found:
            assert len({batch[index].dtype for index in one.indices}) == 1
            (launch,) = ListCopy.launches(one.targets, one.sources, 0)
            assert len(launch.tensors) == len(one.indices)


def test_the_kernel_is_that_of_this_pytorchs_header() -> None:
    header = Path(torch.__file__).parent / "include/ATen/native/cuda/MultiTensorApply.cuh"
    if not header.exists():
        pytest.skip("this build of PyTorch has no headers for CUDA")
    text = re.sub(r"\s+", " ", header.read_text())
    assert f"kChunkSize = {list_copies.BLOCK_ELEMENTS};" in text
    assert f"depth_to_max_tensors[5] = {{110, {list_copies.MOST_TENSORS}," in text
    assert f"depth_to_max_blocks[5] = {{320, {list_copies.MOST_BLOCKS}," in text
    assert (
        "struct TensorListMetadata { const void* addresses[n][depth_to_max_tensors[n - 1]]; "
        "int64_t numel_for_tensor[depth_to_max_tensors[n - 1]];"
    ) in text


# Where the kernel is not found, or not led.


def other_parameters(node: Any) -> list[Any]:
    return [synthetic_kernel([word + b"\0" for word in [one.data for one in node.parameters]][::-1], name=node.name)]


def without_the_first_source(node: Any) -> list[Any]:
    data = node.parameters[0].data
    return [synthetic_kernel([struct.pack("<Q", 64) + data[8:], b"\0"], name=node.name)]


def with_other_sizes(node: Any) -> list[Any]:
    data = node.parameters[0].data
    return [synthetic_kernel([data[:1024] + struct.pack("<q", 1) + data[1032:]], name=node.name)]


def without_parameters(node: Any) -> list[Any]:
    return [synthetic_kernel([], name=node.name)]


def twice(node: Any) -> list[Any]:
    return [node, node]


CHANGES = [other_parameters, without_the_first_source, with_other_sizes, without_parameters, twice]


@pytest.mark.parametrize("change", CHANGES)
def test_missing_kernel_is_recorded_with_copies_before_launch(
    change: Callable[[Any], list[Any]], monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    device = CpuDevice()
    stock = device.read

    def read(graph: Any) -> Any:
        captured = stock(graph)
        first, *rest = captured.nodes
        if first.name != str(ListCopy(4, 0)):
            return captured
        return CapturedGraph(nodes=(*change(first), *rest[len(change(first)) - 1 :]), edges=captured.edges)

    monkeypatch.setattr(device, "read", read)
    batches = [[*alike(seed), *(one.to(torch.int64) for one in alike(seed))] for seed in range(CALLS)]
    step = served(weighed, batches, device)
    assert device.captures == 2 and device.set_nodes == 0
    assert reported(step) == (8, 0) and copied[-2:] == [8, 1]


def fails(*arguments: Any) -> Any:
    raise CudaCallFailed("cuGraphGetNodes", None, "refused")


def test_where_nodes_are_not_counted_each_input_has_its_own(monkeypatch: pytest.MonkeyPatch, copied: list[int]) -> None:
    device = CpuDevice()
    monkeypatch.setattr(device, "node_count", fails)
    served(weighed, [alike(seed) for seed in range(CALLS)], device)
    assert device.captures == 1 and device.set_nodes == 0
    assert copied == [4] and CpuCopy.settings >= 4 * (CALLS - AT_THE_RECORDING)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_kernel_that_cannot_be_set_is_recorded_again(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()
    stock = device.pointers

    def pointers(*arguments: Any) -> Any:
        point, done = stock(*arguments).point, iter(range(after))

        def failing(addresses: Any) -> int:
            if next(done, None) is None:
                raise CudaCallFailed("cuGraphExecKernelNodeSetParams", None, "refused")
            return int(point(addresses))

        return SimpleNamespace(point=failing, settle=lambda: None)

    monkeypatch.setattr(device, "pointers", pointers)
    step = served(weighed, [alike(seed) for seed in range(CALLS)], device)
    report = step.report()
    assert (report.dropped_recordings, device.captures) == (1, 2) and reported(step) == (4, 0)


# What PyTorch leaves in the kernel's argument.


class WithRemains(CpuDevice):
    """A device whose launches leave an address of `of()` in what they do not fill."""

    of: Callable[[], torch.Tensor | None] = staticmethod(lambda: None)

    @property
    def left_over(self) -> int:  # type: ignore[override]
        there = self.of()
        return 0 if there is None else there.data_ptr()

    @left_over.setter
    def left_over(self, word: int) -> None:
        pass


def test_stale_address_in_the_argument_is_not_the_copys() -> None:
    device, batches = WithRemains(), [alike(seed) for seed in range(CALLS)]
    device.of = lambda: batches[AT_THE_RECORDING][0]  # type: ignore[method-assign]
    served(weighed, batches, device)
    assert device.captures == 1 and device.set_nodes == CALLS - AT_THE_RECORDING - 1


def test_stale_argument_does_not_point_to_an_attribute() -> None:
    class Holder:
        made: torch.Tensor | None = None

    def program() -> tuple[Callable[..., torch.Tensor], Holder]:
        holder = Holder()

        def step(*batch: torch.Tensor) -> torch.Tensor:
            holder.made = weighed(*batch) * torch.ones(3)
            return holder.made.sum()

        return step, holder

    device = WithRemains()
    (eager, expected), (captured, found) = program(), program()
    device.of = lambda: found.made  # type: ignore[method-assign]
    step = GraphedStep(captured, device=device)
    for seed in range(CALLS):
        assert torch.equal(step(*alike(seed)), eager(*alike(seed)))
        assert found.made is not None and expected.made is not None and torch.equal(found.made, expected.made)
    report = step.report()
    assert report.refusals == () and report.replays == CALLS - AT_THE_RECORDING and device.set_nodes


def test_stale_argument_does_not_point_to_gradients() -> None:
    """Of a step of which it is not known what its operators were given."""

    def program() -> tuple[Callable[..., torch.Tensor], torch.nn.Parameter]:
        weight = torch.nn.Parameter(torch.ones(3))

        def step(*batch: torch.Tensor) -> torch.Tensor:
            weight.grad = None
            made = torch.zeros(3)
            torch.ops.encore_tests.keeps_addresses(made)
            loss = (weight * weighed(*batch) * made).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        return step, weight

    device = WithRemains()
    (eager, expected), (captured, found) = program(), program()
    device.of = lambda: found.grad  # type: ignore[method-assign]
    step = GraphedStep(captured, device=device)
    for seed in range(CALLS):
        assert torch.equal(step(*alike(seed)), eager(*alike(seed)))
        assert found.grad is not None and expected.grad is not None and torch.equal(found.grad, expected.grad)
    assert step.report().refusals == () and device.captures == 1


# The driver's side.


def copy_kernel(argument: bytes, functor: bytes, operator: bytes) -> None:
    launch = ListCopy(4, 0)
    fields = ListCopy.LAYOUT.unpack(argument)
    launch.blocks = [(0, 0)] * sum(1 for elements in fields[128:192] if elements)
    launch(bytearray(argument))


def test_the_driver_is_called_once_for_all_inputs_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, batches = SimulatedDriver(), [[numbers(3 * seed + one, 3 + one) for one in range(3)] for seed in range(4)]
    inputs = CopiedInputs(batches[0])
    copies = inputs.to_fuse(batches[0])
    assert inputs.to_carry(batches[0], copies) == {}
    (copy,) = copies
    (launch,) = ListCopy.launches(copy.targets, copy.sources, left_over=batches[0][0].data_ptr())
    function = Function("multi_tensor_apply_kernel", (ListCopy.LAYOUT.size, 1, 1), copy_kernel)
    driver.add_function(function)
    handle = driver.new_graph()
    driver.add_node(handle, Node("KERNEL", function, [bytes(launch.argument()), b"\0", b"\0"]))
    graph: Any = SimulatedGraph(driver, handle)
    graph.instantiate()

    captured = read_graph(driver, real.CUgraph(handle))
    with pytest.raises(NotCarried, match="1 nodes copy inputs, where there should be 2"):
        find_fused(captured, range(1), copies, 1)
    nodes = find_fused(captured, range(1), copies, 0)
    plan = Plan((), (), tuple(nodes), ())
    last = batches[3][2]
    owned = MemoryRange(address=last.data_ptr() + last.nbytes - 4, size_bytes=4)
    inputs.follow([], host_pointers(driver, graph, captured, plan), [owned], copies)
    assert inputs.followed == [] and inputs.copied_tensors == 3
    for batch, calls in [(batches[0], 0), (batches[1], 1), (batches[1], 0), (batches[2], 1)]:
        driver.calls.clear()
        inputs.bind(batch)
        assert driver.calls.count("cuGraphExecKernelNodeSetParams") == calls
        graph.replay()
        assert all(map(torch.equal, inputs.recording_inputs, batch))
    misaligned = torch.frombuffer(bytearray(64), dtype=torch.float32, offset=2, count=4).copy_(batches[3][1])
    for batch in (
        [batches[3][0], misaligned, batches[2][2]],
        [*batches[2][:2], batches[3][2]],
    ):  # an end is the graph's
        driver.calls.clear()
        inputs.bind(batch)
        assert driver.calls.count("cuGraphExecKernelNodeSetParams") == 1
        graph.replay()
        assert all(map(torch.equal, inputs.recording_inputs, batch))
    driver.check_node_memory()
    driver.failing.add("cuGraphExecKernelNodeSetParams")
    with pytest.raises(NotCarried, match="cuGraphExecKernelNodeSetParams"):
        inputs.bind(batches[0])
