"""Training loops, and parts of PyTorch in them, do under graph_step what they do without it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from library_programs.record import programs as library_programs
from simulated_gpu.operators import CpuDevice
from step_parts import Graph, assert_as_eager, batches, loss_of, network, outcome, state_of, training_step
from step_programs import PROGRAMS
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.flop_counter import FlopCounterMode

from optimizations.capture.step.call import DDP_WARM_UP
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.host_state import reach
from optimizations.capture.step.watch import Watch


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_training_loop_is_replayed_with_eagers_results(name: str) -> None:
    eager = PROGRAMS[name]("cpu")
    expected = outcome(eager, eager.step)
    made, device = PROGRAMS[name]("cpu"), CpuDevice()
    step = GraphedStep(made.step, device=device)
    found = outcome(made, step)
    report = step.report()
    assert report.refusals == ()
    assert len(found) == len(expected)
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(mine, theirs), f"tensor {index}"
    assert (report.replays, len(report.recordings)) == (made.replays, made.recordings)
    assert sum(graph.replays for graph in device.graphs) == made.replays
    assert device.broken == 0


LIBRARY = (
    "sac_with_three_optimizers_and_tuned_temperature",
    "moco_queue_pointer_on_the_device",
    "sam_adaptive_in_place",
    "maml_second_order_inner_loop",
    "nano_gpt_checkpointed_blocks",
    "scaler_that_overflows",
)
"""Programs that a GPU compares as well. They have several optimizers, a queue on the device, two backwards in a step,
second derivatives, activations that are computed again in micro-batches, and steps that a scaler skips."""


@pytest.mark.parametrize("name", LIBRARY)
def test_library_program_has_eagers_results(name: str) -> None:
    make = library_programs()[name]
    eager, made = make("cpu"), make("cpu")
    expected = outcome(eager, eager.step)
    step = GraphedStep(made.step, device=CpuDevice())
    torch.testing.assert_close(outcome(made, step), expected, rtol=0, atol=0, equal_nan=True)
    assert step.report().refusals == () and step.report().replays >= len(made.batches) - 5


# Averages of weights after and in a step: PyTorch's, whose first call differs from later ones, and handwritten


CALLS = 14

AVERAGES: dict[str, Callable[[nn.Module], AveragedModel]] = {
    "equal": AveragedModel,
    "exponential": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "exponential, of buffers too": lambda model: AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
    ),
    "of the program's own": lambda model: AveragedModel(
        model, avg_fn=lambda one, new, count: one + (new - one) / count
    ),
}


def training_with_an_average(
    make: Callable[[nn.Module], AveragedModel], graph: Graph, *, inside: bool, on_the_host: Any = None
) -> Iterator[torch.Tensor]:
    """The count is put to zero after the tenth call, so that the next one copies the weights again."""
    model = network("cpu", norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train, averaged = training_step(model, optimizer), make(model)
    if on_the_host is not None:
        on_the_host.host.add(averaged.n_averaged.untyped_storage().data_ptr())

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch).detach()
        if inside:
            averaged.update_parameters(model)
        return loss

    called = graph(step)
    for index, batch in enumerate(batches("cpu", CALLS)):
        yield called(*batch)
        if not inside:
            averaged.update_parameters(model)
        if index == 9:
            averaged.n_averaged.zero_()
        yield from state_of(averaged)
    assert type(averaged.n_averaged) is torch.Tensor
    yield from state_of(model, optimizer)


@pytest.mark.parametrize("name", sorted(AVERAGES))
def test_average_after_the_step_equals_eager(name: str) -> None:
    report = assert_as_eager(lambda graph: training_with_an_average(AVERAGES[name], graph, inside=False))
    assert (report.refusals, report.replays, len(report.recordings)) == ((), CALLS - 3, 1)


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("on_the_host", [False, True])
def test_average_in_the_step_is_refused(on_the_host: bool) -> None:
    """A count on the host decides whether the weights are copied."""
    make, device = AVERAGES["exponential"], CpuDevice()
    where = device if on_the_host else None
    report = assert_as_eager(
        lambda graph: training_with_an_average(make, graph, inside=True, on_the_host=where), device
    )
    assert report.recordings == () and "after the step" in report.refusals[0].advice
    assert "test_programs.py:" in report.refusals[0].source_line


# Steps over code from `torch.compile`: what compiled code does for one call does not refuse the step.


ROWS, SIZE = 3, 4


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def training() -> Callable[[torch.Tensor], torch.Tensor]:
    """A step over a compiled network, which saves its batch for the backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, 1))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = compiled(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


Batches = Callable[[torch.Tensor, int], torch.Tensor]

BATCHES: dict[str, Batches] = {
    "rows of a data set": lambda data, index: data[index],
    "slices": lambda data, index: data.flatten(0, 1)[index * ROWS : (index + 1) * ROWS],
    "reshaped": lambda data, index: data[index].clone().reshape(1, ROWS, SIZE),
    "views and others in turn": lambda data, index: data[index] if index % 2 else data[index].clone(),
    "at first a view": lambda data, index: data[index] if index < 4 else data[index].clone(),
    "a view in the end": lambda data, index: data[index].clone() if index < 4 else data[index],
    "transposed": lambda data, index: data[index].clone().t().contiguous().t(),
}


@pytest.mark.parametrize("name", sorted(BATCHES))
def test_view_of_a_batch_is_the_same_batch(name: str) -> None:
    """Compiled code detaches what it saves of its arguments if that is a view. A placeholder is none."""
    data = torch.randn(10, ROWS, SIZE, generator=torch.Generator().manual_seed(1))
    batches = [BATCHES[name](data, index) for index in range(len(data))]
    expected = list(map(training(), batches))
    torch.compiler.reset()
    graphed = GraphedStep(training(), device=CpuDevice())
    found = list(map(graphed, batches))
    assert [one.item() for one in found] == [one.item() for one in expected]
    report = graphed.report()
    assert report.refusals == ()
    assert report.replays >= 6


# Modules with collectives are refused by name with a remedy, or run uncaptured as often as they need.


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    """This process alone."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def step_of(model: nn.Module) -> GraphedStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return GraphedStep(training_step(model, optimizer), device=CpuDevice())


def sharded() -> nn.Module:
    return fully_shard(network("cpu"))


MODELS: dict[str, tuple[Any, str, str]] = {
    "find_unused_parameters": (
        lambda: nn.parallel.DistributedDataParallel(network("cpu"), find_unused_parameters=True),
        "uses model with find_unused_parameters=True",
        "leave the option off",
    ),
    "gloo": (
        lambda: nn.parallel.DistributedDataParallel(network("cpu")),
        "uses model over gloo, whose collectives run on the host",
        "use the backend nccl",
    ),
    "DataParallel": (lambda: nn.DataParallel(network("cpu")), "a DataParallel", "use DistributedDataParallel"),
    "fully sharded": (sharded, "a fully sharded module", "use DistributedDataParallel"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_refusal_names_the_cause_and_the_remedy(name: str) -> None:
    make, reason, advice = MODELS[name]
    step = step_of(make())
    losses = [step(*batch).item() for batch in batches("cpu", 2)]
    (refusal,) = step.report().refusals
    assert reason in refusal.reason and advice in refusal.advice
    assert all(loss > 0 for loss in losses) and step.report().eager_calls == 2


def test_distributed_data_parallel_runs_uncaptured_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.parallel.DistributedDataParallel(network("cpu"))
    monkeypatch.setattr(distributed, "get_backend", lambda group: "nccl")
    step = step_of(model)
    for batch in batches("cpu", DDP_WARM_UP - 1):
        step(*batch)
    report = step.report()
    assert (report.refusals, report.eager_calls, report.recordings) == ((), DDP_WARM_UP - 1, ())


def test_gradient_exchange_of_a_backward_is_part_of_the_key() -> None:
    model = nn.parallel.DistributedDataParallel(network("cpu"))
    for batch in batches("cpu", 3):
        training_step(model, torch.optim.SGD(model.parameters(), lr=0.1))(*batch)
    state = reach([("model", model)])
    watch = Watch(state, lambda held, key: False, lambda tensor: True, [])
    assert watch.unchanged()
    with model.no_sync():
        assert not watch.unchanged()
        assert watch.differing() == ["model.require_backward_grad_sync"]
    assert watch.unchanged()
    before = state.snapshot()
    loss_of(model, *batches("cpu", 1)[0]).backward()
    assert list(state.changes(before)) == []  # what it notes for itself is none
    model.eval()
    assert not watch.unchanged()


# Steps that use tensors without data: they compute shapes or count operations.


Counted = Callable[[nn.Module, torch.Tensor], int]


def made_in_a_mode(model: nn.Module, x: torch.Tensor) -> int:
    with FakeTensorMode():
        return (torch.empty(3, 4) + 1).repeat(2, 1).shape[0]


def floating_point_operations(model: nn.Module, x: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counted:
        model(x)
    return int(counted.get_total_flops())


def on_meta(model: nn.Module, x: torch.Tensor) -> int:
    with torch.device("meta"):
        return nn.Linear(4, 4)(torch.empty(2, 4)).shape[0]


@pytest.mark.parametrize("count", [made_in_a_mode, floating_point_operations, on_meta])
def test_step_that_reads_shapes_is_replayed(count: Counted) -> None:
    def step_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            number = count(model, x)
            optimizer.zero_grad()
            loss = model(x).square().mean() * number
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.load_state_dict(first.state_dict())
    step, expected = GraphedStep(step_of(first), device=CpuDevice()), step_of(second)
    for _ in range(7):
        x = torch.randn(3, 4)
        assert torch.equal(step(x), expected(x))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert step.report().refusals == () and step.report().replays >= 3
