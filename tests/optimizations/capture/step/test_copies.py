"""Inputs and results that a graph of a step copies itself: it is led to them before each launch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # not in a call that is observed, which would not count then
from cuda.bindings import driver as real
from simulated_gpu.driver import Node, SimulatedDriver
from simulated_gpu.operators import CpuCopy, CpuDevice, copied, settings
from step_parts import KeepsMasks, batches, network, training_step

from optimizations.capture.copy_nodes import MOST_CARRIED, NotCarried, find_copies
from optimizations.capture.step import outputs
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.observer import storage
from optimizations.capture.step.outputs import Outputs
from optimizations.graph.memory import overlaps

__all__ = ["copied", "settings"]
pytestmark = pytest.mark.usefixtures("settings")


def training(give: Callable[[torch.Tensor], Any] = lambda loss: loss) -> Callable[..., Any]:
    model = network("cpu")
    train = training_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return lambda batch: give(train(batch).detach())


def run(step: Callable[..., Any], calls: list[Any]) -> list[torch.Tensor]:
    """Everything the calls returned, kept until the end."""
    kept = [step(*call) for call in calls]
    return [tensor for found in kept for tensor in (found if isinstance(found, (tuple, list)) else [found])]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "one": lambda loss: loss,
    "several, one twice": lambda loss: (loss, loss * 2, loss),
    "a view": lambda loss: torch.stack([loss, loss + 1])[1],
    "not contiguous": lambda loss: (loss * torch.ones(4, 3)).T,
    "empty": lambda loss: (loss, loss.new_zeros(0, 3)),
    "large": lambda loss: loss * torch.ones(outputs.MOST_CARRIED_BYTES),
    "many": lambda loss: [loss * index for index in range(MOST_CARRIED + 2)],
    "expanded": lambda loss: (loss * torch.arange(5.0))[:, None].expand(5, 3),
    "expanded to more than is copied by the graph": lambda loss: (loss * torch.arange(5.0)).expand(100_000, 5),
    "expanded, beside others": lambda loss: (loss, (loss * torch.arange(5.0)).expand(3, 5), loss * torch.ones(3)),
    "large and expanded": lambda loss: (
        (loss * torch.arange(float(outputs.MOST_CARRIED_BYTES)))[:, None].expand(-1, 2),
        loss * torch.ones(outputs.MOST_CARRIED_BYTES),
    ),
    "a column, expanded": lambda loss: (loss * torch.arange(36.0).reshape(6, 6))[:, 1:2].expand(-1, 3),
    "many columns, expanded": lambda loss: [
        (loss * index * torch.arange(36.0).reshape(6, 6))[:, 1].expand(3, -1) for index in range(MOST_CARRIED + 2)
    ],
    "a part of each row": lambda loss: (loss * torch.arange(36.0).reshape(6, 6))[:, 2:4],
    "channels last": lambda loss: (loss * torch.ones(2, 3, 4, 4)).to(memory_format=torch.channels_last),
}
IN_THE_GRAPH = sorted({*RESULTS} - {"empty", "large", "many", "many columns, expanded", "large and expanded"})


@pytest.mark.parametrize("kind", sorted(RESULTS))
@pytest.mark.parametrize("nodes", [True, False])
def test_results_are_valid_as_long_as_they_are_held(kind: str, nodes: bool) -> None:
    calls = batches("cpu")
    expected = run(training(RESULTS[kind]), calls)
    step = GraphedStep(training(RESULTS[kind]), device=CpuDevice(copies_are_nodes=nodes))
    assert_same(run(step, calls), expected)
    assert step.report().replays == len(calls) - 3
    assert step.report().refusals == ()


@pytest.mark.parametrize("kind", sorted(RESULTS))
def test_results_lie_in_memory_as_eagers_do(kind: str) -> None:
    """And an expanded one takes as little."""
    calls = batches("cpu")
    expected = run(training(RESULTS[kind]), calls)
    found = run(GraphedStep(training(RESULTS[kind]), device=CpuDevice()), calls)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.stride() == theirs.stride() and mine.storage_offset() in (0, theirs.storage_offset())
        assert mine.untyped_storage().nbytes() <= theirs.untyped_storage().nbytes()


@pytest.mark.parametrize("kind", sorted(RESULTS))
def test_results_may_be_used_like_own_tensors(kind: str) -> None:
    weight = torch.ones((), requires_grad=True)
    step = GraphedStep(lambda x: RESULTS[kind](x.sum()), device=CpuDevice())
    with torch.no_grad():
        found = run(step, [(torch.rand(3),) for _ in range(6)])
    assert step.report().replays
    for result in found[-1:]:
        assert not result._is_view()
        result.detach_()
        if not overlaps(result):
            result.mul_(weight)
            assert result.requires_grad


@pytest.mark.parametrize("kind", IN_THE_GRAPH)
def test_the_graph_copies_the_memory_of_small_results(kind: str, copied: list[int]) -> None:
    calls = batches("cpu")
    step = GraphedStep(training(RESULTS[kind]), device=CpuDevice())
    run(step, calls[:5])
    copied.clear()
    run(step, calls[5:])
    assert copied == [] and step.report().replays == len(calls) - 3


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize(("layers", "rows", "behind"), [(3, 5, 0), (3, 10_000, 0), (MOST_CARRIED + 1, 5, 1)])
def test_the_graph_copies_what_attributes_are_bound_to(
    layers: int, rows: int, behind: int, each: bool, copied: list[int]
) -> None:
    """As far as not too many are: then what is returned stays in the graph."""
    torch.manual_seed(4)
    model, like = KeepsMasks(layers, rows, each=each), KeepsMasks(layers, rows, each=each)
    like.load_state_dict(model.state_dict())
    step = GraphedStep(lambda x: model(x).detach(), device=CpuDevice())
    kept = []
    for index in range(8):
        x = torch.randn(6, 4)
        if index == 5:
            copied.clear()
        torch.testing.assert_close(step(x), like(x).detach())
        for mine, theirs in zip(model.layers, like.layers, strict=True):
            assert torch.equal(mine.mask, theirs.mask) and mine.mask.stride() == theirs.mask.stride()
        kept.append([(layer.mask, layer.mask.clone()) for layer in model.layers])
    assert all(torch.equal(mask, before) for masks in kept for mask, before in masks), "results stay valid"
    assert step.report().replays == 5
    assert copied == ([layers] * 3 if behind and each else [])


def test_launch_copies_nothing_outside_the_graph(copied: list[int]) -> None:
    calls = batches("cpu")
    expected = run(training(), calls)
    step = GraphedStep(training(), device=CpuDevice())
    found = run(step, calls[:5])
    copied.clear()
    before = CpuCopy.settings
    found += run(step, calls[5:7])
    assert CpuCopy.settings - before == 2 * 3  # two inputs and one result of each call
    found += run(step, calls[7:])
    assert_same(found, expected)
    before = CpuCopy.settings
    run(step, calls[-1:])
    assert CpuCopy.settings - before == 1  # the same batch: only the result lies elsewhere
    assert copied == []


OVERLAPPING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda x: x[:4].expand(3, 4),
    "windows": lambda x: x.as_strided((3, 3), (2, 1)),
    "a column, expanded": lambda x: x.reshape(6, 6)[:, 2:3].expand(-1, 3),
    "a column of a large matrix, expanded": lambda x: (x[:, None] * torch.ones(36, 1000))[:, :1].expand(-1, 5),
}


@pytest.mark.parametrize("kind", sorted(OVERLAPPING))
def test_inputs_whose_elements_share_memory_are_passed(kind: str) -> None:
    graphed = GraphedStep(lambda x: x * 2, device=CpuDevice())
    for _ in range(8):
        x = OVERLAPPING[kind](torch.rand(36))
        assert torch.equal(graphed(x), x * 2)
    assert graphed.report().replays >= 4, graphed.report().refusals


def test_inputs_of_other_layouts_are_copied_before_the_launch(copied: list[int]) -> None:
    calls = [({**batch, "x": batch["x"].T.contiguous().T},) for (batch,) in batches("cpu")]
    expected = run(training(), calls)
    step = GraphedStep(training(), device=CpuDevice())
    found = run(step, calls[:5])
    copied.clear()
    found += run(step, calls[5:])
    assert_same(found, expected)
    assert copied == [1] * len(calls[5:])


def test_an_input_that_the_step_writes_is_the_callers() -> None:
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["x"].mul_(2)
        return batch["x"].sum()

    calls, again = batches("cpu"), batches("cpu")
    expected = run(step, calls)
    graphed = GraphedStep(step, device=CpuDevice())
    assert_same(run(graphed, again), expected)
    assert graphed.report().replays == len(calls) - 3
    assert_same([batch["x"] for (batch,) in again], [batch["x"] for (batch,) in calls])


@pytest.mark.parametrize("moves", [False, True])
def test_adjacent_inputs_of_one_tensor_may_be_written(*, moves: bool) -> None:
    """As caches of keys and values do."""

    def step(x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        keys.add_(x)
        values.mul_(0.5).add_(keys)
        return (x * values).sum()

    graphed = GraphedStep(step, device=CpuDevice())
    caches = [torch.ones(2, 3), torch.ones(2, 3)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(7):
        x = torch.randn(3, generator=generator)
        caches = [one.clone() if moves else one for one in caches]
        found, expected = (run_it(x, *cache) for run_it, cache in zip((graphed, step), caches, strict=True))
        assert torch.equal(found, expected) and torch.equal(*caches)
    assert graphed.report().replays == 4


def test_result_without_memory_ends_the_call_before_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that catches this calls again, and must not have its weights changed twice."""
    weight = torch.zeros(200, 200)

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.add_(x)
        return weight * 2

    full = False

    def unless_full(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocating(*arguments: Any, **keywords: Any) -> torch.Tensor:
            if full:
                raise torch.OutOfMemoryError("no memory")
            return allocate(*arguments, **keywords)

        return allocating

    for owner, name in ((torch, "empty_strided"), (torch.Tensor, "clone")):
        monkeypatch.setattr(owner, name, unless_full(getattr(owner, name)))
    graphed, x = GraphedStep(step, device=CpuDevice()), torch.ones(200, 200)
    for count in range(1, 7):
        assert torch.equal(graphed(x), 2 * count * x)
    full = True
    with pytest.raises(torch.OutOfMemoryError):
        graphed(x)
    full = False
    assert torch.equal(graphed(x), 14 * x)
    assert graphed.report().replays == 4


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 5, 8])
def test_unpatchable_graph_is_recorded_again_with_copies(
    after: int, monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    """The driver refuses at the capture, at its launch, or in some later call: nothing is lost, and nothing done twice.
    At its launch, gradients from before are gone, so one more call is looked at. (Memory for the result may lie where
    it lay at the capture; then the driver is asked in the next call.)"""
    monkeypatch.setattr(CpuCopy, "refuse_after", after)
    calls = batches("cpu", 12)
    expected = run(training(), calls)
    step = GraphedStep(training(), device=CpuDevice())
    assert_same(run(step, calls), expected)
    report = step.report()
    assert report.refusals == ()
    assert len(calls) - report.replays in ({3, 4} if after == 3 else {3})
    assert report.dropped_recordings == (after >= 3)
    assert copied[-2:] == [2, 1]  # the batch, and the result


# The driver's side.


def graph_of(driver: SimulatedDriver, *copies: dict[str, int]) -> Any:
    handle = driver.new_graph()
    for copy in copies:
        driver.add_node(handle, Node("MEMCPY", copy=copy))
    _, executable = driver.cuGraphInstantiate(real.CUgraph(handle), 0)
    return SimpleNamespace(raw_cuda_graph=lambda: handle, raw_cuda_graph_exec=lambda: int(executable))


def memory(value: float) -> torch.Tensor:
    return torch.full((4,), value)


def ends(source: torch.Tensor, target: torch.Tensor, **more: int) -> dict[str, int]:
    return {"source": source.data_ptr(), "destination": target.data_ptr(), "bytes": source.nbytes, **more}


@pytest.fixture
def driver() -> SimulatedDriver:
    return SimulatedDriver()


def test_copy_uses_its_new_addresses_from_the_next_launch(driver: SimulatedDriver) -> None:
    first, second, target, other = memory(1), memory(2), memory(0), memory(0)
    unrelated = memory(7), memory(0)
    graph = graph_of(driver, ends(*unrelated), ends(first, target))
    (node,) = find_copies(driver, graph, [(first.data_ptr(), target.data_ptr())])
    launch = lambda: driver.launch(graph.raw_cuda_graph_exec())  # noqa: E731
    launch()
    assert target.tolist() == first.tolist() and unrelated[1].tolist() == unrelated[0].tolist()
    node.read_from(second.data_ptr())
    launch()
    assert target.tolist() == second.tolist()
    node.write_to(other.data_ptr())
    target.zero_()
    launch()
    assert other.tolist() == second.tolist() and target.tolist() == [0] * 4
    driver.failing.add("cuGraphExecMemcpyNodeSetParams")
    with pytest.raises(NotCarried, match="cuGraphExecMemcpyNodeSetParams"):
        node.read_from(first.data_ptr())


@pytest.mark.parametrize("case", ["none", "two", "rows", "unreadable"])
def test_a_copy_that_is_not_one_node_is_not_carried(case: str) -> None:
    driver = SimulatedDriver()
    first, target = memory(1), memory(0)
    wanted = ends(first, target)
    given = {"none": [], "two": [wanted, wanted], "rows": [{**wanted, "height": 2}], "unreadable": [wanted]}[case]
    graph = graph_of(driver, *given)
    if case == "unreadable":
        driver.failing.add("cuGraphMemcpyNodeGetParams")
    with pytest.raises(NotCarried):
        find_copies(driver, graph, [(first.data_ptr(), target.data_ptr())])


def test_input_with_a_refused_address_is_read_from_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As memory of another process may be. The graph stays, and others are read where they lie."""
    calls = batches("cpu", 12)
    expected = run(training(), calls)
    foreign = {batch["x"].data_ptr() for (batch,) in calls[6:9]}
    stock = CpuCopy.read_from

    def read_from(self: CpuCopy, address: int) -> None:
        if address in foreign:
            raise NotCarried("foreign")
        stock(self, address)

    monkeypatch.setattr(CpuCopy, "read_from", read_from)
    step = GraphedStep(training(), device=CpuDevice())
    assert_same(run(step, calls), expected)
    report = step.report()
    assert (report.replays, report.dropped_recordings) == (len(calls) - 3, 0)


def test_sparse_result_is_copied_out_of_empty_tensors() -> None:
    returned = torch.eye(2).to_sparse()
    outputs = Outputs(returned, [], {storage(torch.empty(0))})
    fresh = outputs.prepare()
    outputs.copy_out(fresh)
    result = outputs.take([], fresh)
    returned._values().zero_()  # as the next launch writes it
    assert torch.equal(result.to_dense(), torch.eye(2))


@pytest.mark.parametrize(
    "result",
    [
        lambda x: x.conj(),
        lambda x: x.mH[1:],
        lambda x: x.conj().imag,
        lambda x: torch._neg_view(torch.view_as_real(x))[0],
    ],
)
def test_lazy_view_of_an_argument_means_what_it_does_in_eager(
    result: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    step = GraphedStep(lambda x: (x.abs(), result(x)), device=CpuDevice())
    for index in range(6):
        x = torch.full((2, 2), complex(index, 3))
        (size, found), expected = step(x), result(x)
        assert torch.equal(size, x.abs()) and torch.equal(found, expected)
        assert (found.is_conj(), found.is_neg()) == (expected.is_conj(), expected.is_neg())
        x.add_(1)
        assert torch.equal(found, expected)  # it still lies in the argument's memory
    assert step.report().replays == 3
