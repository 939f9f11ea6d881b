"""Steps that draw random numbers on the host which, by the caller's word, decide nothing: `host_draws="unused"`."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from simulated_gpu.operators import CpuDevice, CpuDeviceWithHost
from step_parts import batches, network, training_step

import optimizations
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.observer import Observer, StepRefused, storage

Step = Callable[[dict[str, torch.Tensor]], Any]

OWN_PYTHON, OWN_NUMPY, OWN_TORCH = random.Random(3), numpy.random.default_rng(3), torch.Generator()

DRAWS: dict[str, tuple[Callable[[], Any], str]] = {
    "a tensor of rank 0": (lambda: torch.rand([]), "torch's CPU generator"),
    "Python": (lambda: random.random(), "random"),
    "NumPy": (lambda: numpy.random.rand(), "numpy.random"),
    "a generator of Python": (lambda: OWN_PYTHON.random(), "OWN_PYTHON"),
    "a generator of NumPy": (lambda: OWN_NUMPY.random(), "OWN_NUMPY"),
    "a generator of PyTorch": (lambda: torch.rand([], generator=OWN_TORCH), "OWN_TORCH"),
}


def seed(number: int = 3) -> None:
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def layer_drop(draw: Callable[[], Any], rate: float = 0.0) -> tuple[Step, torch.nn.Module]:
    """As Hugging Face's models train: a number before each layer, and a branch."""
    model = network("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        x = batch["x"]
        for layer in model.children():
            if draw() < rate:
                x = x * 2
            x = layer(x)
        loss = torch.nn.functional.cross_entropy(x, batch["y"])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model


def outcome(step: Step, model: torch.nn.Module) -> list[torch.Tensor]:
    seed()
    losses = [step(*batch) for batch in batches("cpu")]
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("name", sorted(DRAWS))
def test_a_step_whose_draws_decide_nothing_is_one_graph(name: str) -> None:
    draw, generator = DRAWS[name]
    expected = outcome(*layer_drop(draw))
    plain, model = layer_drop(draw)
    device = CpuDeviceWithHost()
    step = GraphedStep(plain, device=device, host_draws="unused")
    found = outcome(step, model)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    report = step.report()
    assert (report.refusals, report.replays, device.captures, device.broken) == ((), 9 - 3, 1, 0)
    assert report.host_draws == "unused"
    (named,) = report.drawn_on_the_host
    assert named.endswith(generator)


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("name", sorted(DRAWS))
def test_without_the_callers_word_it_is_refused_and_told_of_it(name: str) -> None:
    draw, generator = DRAWS[name]
    expected = outcome(*layer_drop(draw))
    plain, model = layer_drop(draw)
    step = GraphedStep(plain, device=CpuDeviceWithHost())
    found = outcome(step, model)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    report = step.report()
    assert f"draws random numbers on the host ({generator}" in report.refusals[0].reason.replace("layer_drop.", "")
    assert "say so with host_draws='unused'" in report.refusals[0].advice
    assert (report.replays, report.host_draws, report.drawn_on_the_host) == (0, "refused", ())


def test_launches_leave_the_hosts_generators_where_they_are() -> None:
    def draw() -> float:
        return torch.rand([]).item() + random.random() + float(numpy.random.rand())

    plain, _ = layer_drop(draw)
    step = GraphedStep(plain, device=CpuDeviceWithHost(), host_draws="unused")

    def states() -> list[Any]:
        return [random.getstate(), numpy.random.get_state()[2], torch.random.get_rng_state().tolist()]

    seed()
    found = []
    for batch in batches("cpu"):
        step(*batch)
        found.append(states())
    eager, _ = layer_drop(draw)
    seed()
    expected = []
    for batch in batches("cpu")[:4]:
        eager(*batch)
        expected.append(states())
    assert found[:4] == expected, "calls that run as they are, or are recorded, draw as in eager"
    assert all(one == found[3] for one in found[4:])
    assert step.report().drawn_on_the_host == ("numpy.random", "random", "torch's CPU generator")


def test_random_numbers_of_the_gpu_stay_those_of_eager() -> None:
    results = []
    for graphed in (False, True):
        model = network("cpu", dropout=0.5)
        train = training_step(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def plain(batch: dict[str, torch.Tensor], train: Any = train) -> torch.Tensor:
            return train(batch).detach() if random.random() >= 0 else train(batch)  # type: ignore[no-any-return]

        step = GraphedStep(plain, device=CpuDevice(), host_draws="unused") if graphed else plain
        results.append(outcome(step, model))
        if graphed:
            assert step.report().replays == 6 and step.report().drawn_on_the_host == ("random",)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))


kept = SimpleNamespace(last=None, number=0.0)


def binds(x: torch.Tensor) -> torch.Tensor:
    kept.last = torch.rand([])
    return x * 2


def scales_in_place(x: torch.Tensor) -> torch.Tensor:
    drawn = torch.rand([])
    drawn.mul_(3)
    return x * drawn


SAYS = "that seem to decide something, other than host_draws='unused' says: it "
DECIDE: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a number": (lambda x: x * random.random(), f"(random) {SAYS}differs in two calls with equal shapes: one gave mul"),
    "a tensor": (lambda x: x * torch.rand([]), f"(torch's CPU generator) {SAYS}differs in two calls with equal shapes"),
    "what is computed of a tensor": (lambda x: x * (torch.rand([]) + 1).sqrt(), f"{SAYS}differs in two calls"),
    "a tensor that is written": (scales_in_place, f"{SAYS}differs in two calls"),
    "many values": (lambda x: x[torch.rand(40).argsort()[:3] % 3], f"{SAYS}differs in two calls"),
    "a value that is read": (lambda x: x * torch.rand([]).item(), f"{SAYS}differs in two calls"),
    "a number that is returned": (lambda x: (x * 2, random.random()), f"{SAYS}returns something else than a tensor"),
    "a tensor that is returned": (lambda x: (x * 2, torch.rand([])), f"{SAYS}returns, or keeps in an attribute"),
    "a tensor that is kept": (binds, f"{SAYS}returns, or keeps in an attribute"),
}


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("name", sorted(DECIDE))
def test_draw_that_is_used_is_refused_at_the_first_difference(name: str) -> None:
    plain, words = DECIDE[name]
    results = []
    for graphed in (False, True):
        device = CpuDeviceWithHost()
        step: Any = GraphedStep(plain, device=device, host_draws="unused") if graphed else plain
        seed()
        found = [step(torch.full((3,), float(index))) for index in range(8)]
        results.append(list(map(repr, found)))
        if graphed:
            report = step.report()
            assert words in report.refusals[0].reason
            assert "draw them before the step" in report.refusals[0].advice
            assert (report.replays, device.captures, report.eager_calls) == (0, 0, 8)
    assert results[0] == results[1]


def seed_with(*taken: bool) -> int:
    """A seed whose first draws are below a half as given."""
    for number in range(10_000):
        draws = random.Random(number)
        if tuple(draws.random() < 0.5 for _ in taken) == taken:
            return number
    raise AssertionError(taken)


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize(
    ("taken", "captures"), [((True, True, False, False, False), 0), ((True, True, True, False, False, False, False), 1)]
)
def test_a_branch_that_is_seen_to_be_decided_is_refused(taken: tuple[bool, ...], captures: int) -> None:
    """In the observed calls, and in the one that is captured."""

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if random.random() < 0.5 else x + 1

    results = []
    for graphed in (False, True):
        device = CpuDevice()
        step: Any = GraphedStep(plain, device=device, host_draws="unused") if graphed else plain
        random.seed(seed_with(*taken))
        results.append(torch.stack([step(torch.full((3,), float(index))) for index in range(9)]))
        if graphed:
            (refusal,) = step.report().refusals
            assert (
                f"draws random numbers on the host (random) {SAYS}differs in two calls with equal shapes"
                in refusal.reason
            )
            assert (step.report().replays, device.captures) == (0, captures)
    assert torch.equal(*results)


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("bound", [2.0, 0.5])
def test_constant_host_tensor_may_reach_the_gpu(bound: float) -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * ((torch.rand([]) < bound) + 1)

    number = next(one for one in range(1000) if below(one, 0.5, 6) == [True, True, True, False, False, False])
    results = []
    for graphed in (False, True):
        device = CpuDeviceWithHost()
        step: Any = GraphedStep(plain, device=device, host_draws="unused") if graphed else plain
        torch.manual_seed(number)
        results.append(torch.stack([step(torch.full((3,), float(index))) for index in range(9)]))
        if graphed and bound > 1:
            assert (step.report().refusals, step.report().replays) == ((), 6)
        elif graphed:
            assert "one gave mul '1' where the call before gave '2'" in step.report().refusals[0].reason
            assert (step.report().replays, device.captures) == (0, 1)
    assert torch.equal(*results)


CHOICES: dict[str, tuple[Callable[[torch.Tensor, bool], Any], str]] = {
    "one of two that it computed": (
        lambda x, first: (x + 1, x + 2)[first] * 3,
        "differs in two calls with equal shapes",
    ),
    "one of two parts": (
        lambda x, first: torch.stack([x, x + 1]).unbind(0)[first] * 2,
        "differs in two calls with equal",
    ),
    "a result that it computed": (lambda x, first: (x + 1, x + 2)[first], "returns, or keeps in an attribute, another"),
    "a result that it was given": (lambda x, first: (x, x * 2)[first], "returns, or keeps in an attribute, another"),
    "a number that it returns": (lambda x, first: (x * 2, first), "returns something else than a tensor"),
}


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("name", sorted(CHOICES))
@pytest.mark.parametrize(
    ("taken", "captures"), [((True, True, False, False, False), 0), ((True, True, True, False, False, False, False), 1)]
)
def test_a_choice_among_tensors_of_one_shape_is_seen(name: str, taken: tuple[bool, ...], captures: int) -> None:
    """In the observed calls, and in the one that is captured: no operator is another, and none has other numbers."""
    plain, words = CHOICES[name]
    results = []
    for graphed in (False, True):
        device = CpuDevice()
        step: Any = lambda x: plain(x, random.random() < 0.5)  # noqa: E731
        step = GraphedStep(step, device=device, host_draws="unused") if graphed else step
        random.seed(seed_with(*taken))
        results.append([repr(step(torch.full((3,), float(index)))) for index in range(9)])
        if graphed:
            (refusal,) = step.report().refusals
            assert f"{SAYS}{words}" in refusal.reason
            assert (step.report().replays, device.captures) == (0, captures)
    assert results[0] == results[1]


def test_parts_of_one_storage_that_are_given_are_no_choice() -> None:
    """They lie at another distance in each call, and where they are captured they lie apart."""
    data = torch.arange(100.0)

    def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        random.random()
        (first, second), (third, fourth) = x.chunk(2), y.chunk(2)
        return first * third + second * fourth + y[:4]

    step = GraphedStep(plain, device=CpuDevice(), host_draws="unused")
    for index in range(9):
        given = data[:8], data[4 * (index % 2) : 4 * (index % 2) + 8]
        assert torch.equal(step(*given), plain(*given))
    assert (step.report().refusals, step.report().replays) == ((), 6)


def below(number: int, bound: float, count: int) -> list[bool]:
    torch.manual_seed(number)
    return [bool(torch.rand([]) < bound) for _ in range(count)]


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_with_raise_the_refusal_is_an_error() -> None:
    step = GraphedStep(DECIDE["a number"][0], device=CpuDevice(), host_draws="unused", on_refusal="raise")
    with pytest.raises(StepRefused, match="that seem to decide something"):
        for _ in range(5):
            step(torch.ones(3))


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("draw", [random.random, lambda: numpy.random.rand(), lambda: torch.rand([])])
def test_calls_that_draw_the_same_numbers_tell_nothing(draw: Callable[[], Any]) -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if draw() < 2 else x + 1

    step = GraphedStep(plain, device=CpuDeviceWithHost(), host_draws="unused")
    for index in range(12):
        seed()
        assert torch.equal(step(torch.full((3,), float(index))), torch.full((3,), float(index)) * 2)
    (refusal,) = step.report().refusals
    assert "draws the same random numbers on the host in each call" in refusal.reason
    assert step.report().replays == 0


def test_what_the_gpu_leaves_in_cpu_memory_is_no_draw() -> None:
    """As the seeds that attention keeps for its backward, which are others in each call."""
    traces = []
    for value in (1.0, 2.0):
        x = torch.full((3,), value)
        observer = Observer(lambda tensor, x=x: storage(tensor) == storage(x), {}, forbid=False)
        observer.compares_values = True
        with observer:
            left = x.sum()
            x.mul_(left)
        traces.append([(one.name, one.arguments) for one in observer.operations])
    assert traces[0] == traces[1]


def test_the_option_is_checked_and_kept_by_copies() -> None:
    words = "host_draws='used' is unknown; allowed are 'refused', 'unused'"
    with pytest.raises(ValueError, match=words):
        optimizations.graph_step(layer_drop, host_draws="used")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        optimizations.graph_callables(torch.nn.Linear(2, 2), [], host_draws="used")  # type: ignore[arg-type]
    step = optimizations.graph_step(host_draws="unused")(SimpleNamespace)
    assert step.report().host_draws == "unused"
    assert copy.deepcopy(step).report().host_draws == "unused"
