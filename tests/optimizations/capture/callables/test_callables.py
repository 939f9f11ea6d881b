"""Graphed callables do what the callables do, in any order of micro-batches; what cannot be is an error."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from callable_parts import gradients, same
from simulated_gpu.operators import CpuDevice, CpuGraph
from torch import nn

from optimizations.capture.callables import slot as launches
from optimizations.capture.callables.graph_callables import GraphedCallables
from optimizations.report.steps import WrongOrder
from tests.optimizations.capture.step.test_replaying import counted


class Stage(nn.Module):
    """A layer with dropout, running statistics, and buffers that its forward writes: one as the amax of FP8, and one as
    weights that are cast for the first micro-batch."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("amax", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("cast", self.linear.weight.detach().clone())

    def forward(self, x: torch.Tensor, *, is_first_microbatch: bool = False) -> torch.Tensor:
        with torch.no_grad():
            self.amax.copy_(torch.maximum(self.amax, x.detach().abs().amax()))
            if is_first_microbatch:
                self.cast.copy_(self.linear.weight.round(decimals=2))
        y = self.norm(x @ self.cast + self.linear(x * self.scale)).relu()
        return nn.functional.dropout(y, 0.1, self.training)

    def update(self) -> None:
        """Run what an FP8 recipe does once per step."""
        with torch.no_grad():
            self.scale.copy_(1 + self.amax / 10)
            self.amax.zero_()


SCHEDULES: dict[str, tuple[list[int], list[int]]] = {
    "GPipe": ([1, 1, 1, 2, 2, 2, -2, -2, -2, -1, -1, -1], [3, 3]),
    "1F1B": ([1, 1, 2, -2, -1, 1, 2, -2, -1, 2, -2, -1], [2, 1]),
    "interleaved": ([1, 1, 2, 2, 1, -2, 2, -1, -2, -1, -2, -1], [3, 2]),
    "one at a time": ([1, 2, -2, -1] * 3, [1, 1]),
}
"""Schedules of two stages, and how many micro-batches of each stage are live at one time."""


ITERATIONS = 4


def follow(
    call: Sequence[Callable[..., Any]], order: Sequence[int], batches: list[torch.Tensor], *, flags: bool = False
) -> list[torch.Tensor]:
    """Return the losses of one step in which two stages run in this order, as a pipeline's loop does."""
    waiting: dict[int, list[Any]] = {1: [], 2: []}
    between: list[torch.Tensor] = []
    slopes: list[torch.Tensor] = []
    losses = []
    feed = iter(batches)
    counts = {1: 0, 2: 0}
    for entry in order:
        words = {"is_first_microbatch": counts[abs(entry)] == 0} if flags else {}
        counts[abs(entry)] += entry > 0
        if entry == 1:
            out = call[0](next(feed), **words)
            waiting[1].append(out)
            between.append(out.detach().requires_grad_())
        elif entry == 2:
            given = between.pop(0)
            loss = call[1](given, **words).square().mean()
            waiting[2].append((given, loss))
            losses.append(loss.detach())
        elif entry == -2:
            given, loss = waiting[2].pop(0)
            loss.backward()
            slopes.append(given.grad)
        else:
            waiting[1].pop(0).backward(slopes.pop(0))
    return losses


def steps(
    call: Sequence[Any], stages: list[Stage], order: list[int], *, flags: bool = False, iterations: int = ITERATIONS
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.05)
    torch.manual_seed(9)
    found = []
    for _ in range(iterations):
        batches = [torch.randn(5, 6, generator=generator) for _ in range(order.count(1))]
        found += follow(call, order, batches, flags=flags)
        optimizer.step()
        optimizer.zero_grad()
        for stage in stages:
            stage.update()
    return [*found, *(t.detach().clone() for stage in stages for t in [*stage.parameters(), *stage.buffers()])]


def graphed(stages: list[Stage], order: list[int] | None = None, **options: Any) -> GraphedCallables:
    sample = torch.randn(5, 6)
    between = torch.randn(5, 6, requires_grad=True)
    options.setdefault("device", CpuDevice())
    return GraphedCallables(stages, [(sample,), (between,)], order=order, **options)


@pytest.mark.filterwarnings("ignore:callable . runs without its graphs. a result of an earlier call")
@pytest.mark.parametrize("how", ["first iteration", "flags", "static", "copied"])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_schedule_equals_eager(name: str, how: Any) -> None:
    """The order is given with samples, or found in the first iteration, with and without keyword flags."""
    (order, live), flags = SCHEDULES[name], how == "flags"
    plain = [Stage(1), Stage(2)]
    expected = steps(plain, plain, order, flags=flags)
    stages = [Stage(1), Stage(2)]
    before = [tensor.clone() for stage in stages for tensor in stage.buffers()]
    with_samples = how in ("static", "copied")
    group = graphed(stages, order, outputs=how) if with_samples else GraphedCallables(stages, device=CpuDevice())
    assert same([tensor for stage in stages for tensor in stage.buffers()], before), "warm-up left no trace"
    assert same(steps(group, stages, order, flags=flags), expected)
    reports, replayed = group.report(), ITERATIONS - (not with_samples)
    assert sum(one.replays for one in reports) + 2 * group.calls_without_graph == replayed * len(order)
    assert group.calls_without_graph <= 4, "variables of the loop hold views of results"
    assert {(one.callable, one.variant) for one in reports} == {(1, 0), (2, 0), *([(1, 1), (2, 1)] if flags else [])}
    pairs = Counter(one.callable for one in reports if one.direction == "forward" and one.variant == 0)
    assert flags or [pairs[1], pairs[2]] == live


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a view": lambda out: out.detach()[0],
    "the storage": lambda out: out.untyped_storage(),
    "DLPack": torch.from_dlpack,
    "DLPack and the result": lambda out: (torch.from_dlpack(out), out),
}


@pytest.mark.parametrize("name", sorted(HOLDERS))
def test_result_referenced_by_its_storage_stays_valid(name: str) -> None:
    """A program that stored its address would read stale memory if the result moved."""
    call = GraphedCallables([torch.exp], [(torch.randn(2, 4),)], device=CpuDevice())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            out = call[0](torch.randn(2, 4))
            held = HOLDERS[name](out)
            seen = held[0] if isinstance(held, tuple) else held
            value = seen.tolist()
            del out
            call[0](torch.randn(2, 4))
            assert seen.tolist() == value
            assert call.calls_without_graph == 1, "results are copied from then on"
            del held, seen


def test_graphs_are_for_calls_with_gradients() -> None:
    module = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with torch.no_grad():
        call = GraphedCallables([module], [(x,)], device=CpuDevice())
        assert torch.equal(call[0](x), nn.functional.linear(x, module.weight, module.bias))
    assert [one.replays for one in call.report()] == [0, 0] and call.calls_without_graph == 0
    call[0](x).sum().backward()
    assert [one.replays for one in call.report()] == [1, 1]


def test_pairs_of_one_callable_share_memory_of_gradients() -> None:
    call = GraphedCallables(nn.Linear(3, 3), [torch.randn(2, 3)], order=[1, 1, -1, -1], device=CpuDevice())
    first, second = ([one for one in slot.gradients if one is not None] for slot in call._slots)
    assert len(first) == 2 and [one.data_ptr() for one in first] == [one.data_ptr() for one in second]


def test_graphed_layers_of_a_list_replay_in_the_model() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    reference = copy.deepcopy(model)
    device = CpuDevice()
    call = GraphedCallables(nn.ModuleList(model), [torch.randn(5, 6, requires_grad=True)], device=device)
    for _ in range(2):
        x = torch.randn(5, 6, requires_grad=True)
        model(x).square().sum().backward()
        reference(x.detach().requires_grad_()).square().sum().backward()
    assert same(gradients(model), gradients(reference))
    assert [one.replays for one in call.report()] == [2] * 6
    call.close()
    assert "forward" not in vars(model[0])
    assert model(torch.randn(2, 6)).shape == (2, 6)
    assert all(graph.freed for graph in device.graphs)


def test_keyword_arguments_are_inputs_too() -> None:
    def mixed(x: torch.Tensor, *, scale: torch.Tensor, power: int) -> torch.Tensor:
        return (x * scale) ** power

    device = CpuDevice()
    sample = torch.randn(3, requires_grad=True)
    call = GraphedCallables([mixed], [(sample,)], sample_kwargs=[{"scale": torch.randn(3), "power": 2}], device=device)
    x, scale = torch.randn(3, requires_grad=True), torch.randn(3)
    found = call[0](x, scale=scale, power=2)
    assert torch.equal(found, (x * scale) ** 2)
    found.sum().backward()
    assert torch.equal(call[0](x, scale=scale, power=3), (x * scale) ** 3)  # another number: no graph
    assert call.calls_without_graph == 1
    assert [one.replays for one in call.report()] == [1, 1]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a number as order": ({"order": 5}, r"order=5 has to be a list of whole numbers, such as \[1, 1, 2"),
    "an order without samples": ({"sample_args": None, "order": [1, -1]}, "need sample_args"),
    "keywords without samples": ({"sample_args": None, "sample_kwargs": [{}]}, "need sample_args"),
    "one dict for all": ({"sample_kwargs": {"scale": 2}}, "sample_kwargs has to be a list with a dict of keyword"),
    "a tensor as samples": ({"sample_args": torch.ones(3)}, "sample_args has to be a list with a tuple of arguments"),
    "too few samples": ({"sample_args": [(torch.ones(3),)] * 2}, "sample_args has 2 entries for 1 callables"),
    "unknown outputs": ({"outputs": "kept"}, "outputs='kept' is unknown; allowed are 'static', 'copied'"),
    "samples in CPU memory": (
        {"device": None},
        "the sample arguments are on no GPU; put them, and the modules",
    ),
    "a module twice": ({"callables": [nn.ReLU()] * 2}, "a callable is given twice: give each once"),
    "a number as callable": ({"callables": [3]}, "graph_callables needs modules and functions, not int"),
    "a list of layers": (
        {"callables": [nn.ModuleList()]},
        "graph_callables needs modules and functions, not ModuleList",
    ),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_argument_structure_names_the_expected_one(name: str) -> None:
    given, words = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=words):
        GraphedCallables(
            **{"callables": nn.Linear(3, 3), "sample_args": [(torch.randn(3),)], "device": CpuDevice(), **given}
        )


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([1, 3, -3, -1], r"order\[1\] is 3, but callables go from 1 to 2"),
        ([1, -1, -1, 2, -2], r"order\[2\] is -1, but no forward of callable 1 is without backward"),
        ([1, -1], "the order has 0 forwards and 0 backwards of callable 2; each callable needs a forward"),
        ([1, 1, 2, -2, -1], "2 forwards and 1 backwards of callable 1; .* and each forward a backward"),
        ([1, 0, 2], r"order\[1\] is 0"),
        *(([1, wrong], rf"order\[1\] is {wrong!r}: entries are whole numbers") for wrong in (True, -1.5, "1", None)),
    ],
)
def test_impossible_order_is_refused(order: list[Any], words: str) -> None:
    with pytest.raises(WrongOrder, match=words):
        GraphedCallables([nn.ReLU(), nn.ReLU()], [torch.ones(3)], order=order, device=CpuDevice())


def test_gradients_are_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(1)
    sample = torch.randn(4, 6, requires_grad=True)
    GraphedCallables([stage], [(sample,)], device=CpuDevice())
    copies: list[int] = []
    stock = launches.copy_all

    def counted(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        copies.append(len(targets))
        stock(targets, sources)

    monkeypatch.setattr(launches, "copy_all", counted)
    stage(torch.randn(4, 6, requires_grad=True)).sum().backward()
    assert copies == [1, 5]  # the tangent; of weight and bias twice, and of the input


class Scaling(nn.Module):
    """Scales by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 3), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.linear(x) * self.scale
        return hidden.relu()


def in_evaluation(module: Any, x: torch.Tensor) -> Any:
    module.eval()
    found = module(x)
    module.train()
    return found


def under_autocast(module: Any, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", enabled=False, dtype=torch.float16):
        return module(x)


def after(change: Callable[[Any], object]) -> Callable[[Any, torch.Tensor], Any]:
    def use(module: Any, x: torch.Tensor) -> Any:
        change(module)
        return module(x)

    return use


OTHERS = "it uses other tensors or numbers, or another mode (train, eval)"
UNSERVED: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "a size": (lambda module, x: module(x[:1]), "shapes"),
    "strides": (lambda module, x: module(x.t().contiguous().t()), "strides"),
    "a gradient": (lambda module, x: module(x.requires_grad_()), "requires_grad"),
    "a keyword": (lambda module, x: module(x=x), "what is passed by keyword"),
    "another mode": (in_evaluation, OTHERS),
    "a setting": (under_autocast, "settings differ from those of the capture"),
    "a parameter": (after(lambda module: setattr(module.linear, "weight", nn.Parameter(torch.ones(3, 3)))), OTHERS),
    "a number": (after(lambda module: setattr(module, "scale", 2.0)), OTHERS),
    "a module": (after(lambda module: setattr(module, "linear", nn.Linear(3, 3))), OTHERS),
}


@pytest.mark.filterwarnings("ignore:callable 1 runs without its graphs")
@pytest.mark.parametrize("name", sorted(UNSERVED))
def test_report_gives_reasons_of_calls_without_graph(name: str) -> None:
    use, words = UNSERVED[name]
    module = Scaling()
    call = GraphedCallables([module], [torch.randn(2, 3)], device=CpuDevice())
    module(torch.randn(2, 3)).sum().backward()
    for _ in range(2):
        x = torch.randn(2, 3)
        found = use(module, x)
        assert torch.equal(found, (module.linear(x) * module.scale).relu()[: len(found)])
        found.sum().backward()
    forward, backward = call.report()
    assert [words in reason for reason in forward.without_graph] == [True]
    assert list(forward.without_graph.values()) == [2] and call.calls_without_graph == 2
    assert forward.replays == 1 and not backward.without_graph


def test_two_tensors_in_place_of_one_are_distinguished() -> None:
    call = GraphedCallables(lambda x, y: x * y, [(x := torch.randn(3), x)], device=CpuDevice())
    assert torch.equal(call[0](x, x + 1), x * (x + 1))
    (forward, *_) = call.report()
    assert ["one tensor in two places" in reason for reason in forward.without_graph] == [True]


def test_warning_is_given_if_the_first_call_does_not_match() -> None:
    """A smaller batch is expected at times; a sample that matches no call is an error of the program."""
    modules = [nn.Linear(3, 3), nn.Linear(3, 3)]
    GraphedCallables(modules, [torch.randn(2, 3)], device=CpuDevice())
    x = torch.randn(2, 3)
    with pytest.warns(UserWarning, match="callable 1 runs .* or precision; none of its calls had one so far"):
        modules[0](x.detach().requires_grad_())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        modules[0](x[:1])
        modules[1](x)
        modules[1](x[:1])
    modules[1].weight = nn.Parameter(torch.ones(3, 3))
    with pytest.warns(UserWarning, match=r"callable 2 runs .*another now: .*weight"):
        modules[1](x)


def functions_called(layers: int) -> list[str]:
    """Count the functions that a forward of a captured network calls, in Python and in C."""
    torch.manual_seed(5)
    model = nn.Sequential(*[module for _ in range(layers) for module in (nn.Linear(8, 8), nn.GELU())])
    given = torch.randn(6, 8)
    expected = model(given).detach()
    (graphed,) = GraphedCallables([model], [(given,)], device=CpuDevice())
    for _ in range(3):
        graphed(given).sum().backward()
    with counted() as names:
        result = graphed(given)
    assert torch.equal(result, expected)
    first = names.index(CpuGraph.replay.__code__.co_name)
    return names[:first]


def test_forward_overhead_is_independent_of_parameter_count() -> None:
    """Per gradient, only its address is read."""
    few, many = functions_called(1), functions_called(12)
    asked = "untyped_storage"
    assert [name for name in many if name != asked] == [name for name in few if name != asked]
    assert many.count(asked) - few.count(asked) <= 2 * 11, "one for each further weight and bias"
