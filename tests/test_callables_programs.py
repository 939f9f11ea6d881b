"""Programs around graphed callables: arguments that are written or change, other modes, copies, transforms."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import io
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from test_callables_differentiation import batches, gradients, graphed, same
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_outputs import BaseModelOutput

from optimizations.capture.callables.graph_callables import WrongOrder
from optimizations.capture.step.observer import StepRefused


class Holder:
    """An object that is none of the kinds that arguments are taken apart into."""

    def __init__(self, scale: Any) -> None:
        self.scale = scale


SETTINGS: dict[str, tuple[Callable[[Any, Any], Any], Any, Callable[[Any], Any]]] = {
    "a number in an object": (lambda x, o: x * o.scale, Holder(2.0), lambda o: setattr(o, "scale", 5.0)),
    "a tensor in an object": (
        lambda x, o: x * o.scale,
        Holder(torch.ones(3)),
        lambda o: setattr(o, "scale", torch.full((3,), 5.0)),
    ),
    "a member of a set": (lambda x, o: x * len(o), {1, 2}, lambda o: o.add(3)),
    "an array of NumPy": (lambda x, o: x * float(o[0]), numpy.array([2.0]), lambda o: o.fill(5.0)),
    "an object in a dict": (
        lambda x, o: x * o["inner"][0].scale,
        {"inner": [Holder(2.0)]},
        lambda o: setattr(o["inner"][0], "scale", 5.0),
    ),
}


@pytest.mark.filterwarnings("ignore:callable 1 runs without its graphs")
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_objects_among_the_arguments_are_looked_into(name: str) -> None:
    function, held, change = SETTINGS[name]
    held = copy.deepcopy(held)
    call = graphed(function, [(torch.randn(3, requires_grad=True), held)])
    for index in range(4):
        if index == 2:
            change(held)
        x = torch.randn(3, requires_grad=True)
        found = call[0](x, held)
        assert torch.equal(found, function(x, held))
        found.sum().backward()
    assert call.calls_without_graph == 2


def test_arguments_that_are_written_are_the_callers() -> None:
    def step(x: torch.Tensor, cache: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        cache.add_(1.0)
        count.add_(1)
        return x * cache

    sample = torch.randn(3, requires_grad=True), torch.zeros(3), torch.zeros((), dtype=torch.int64)
    call = graphed(step, [sample])
    assert not sample[1].any()  # the warm-up ran on copies
    cache, count = torch.zeros(3), torch.zeros((), dtype=torch.int64)
    for index in range(1, 4):
        version = cache._version
        x = torch.randn(3, requires_grad=True)
        found = call[0](x, cache, count)
        assert torch.equal(found, x * index)
        assert cache.tolist() == [index] * 3
        assert count.item() == index
        assert cache._version > version
        found.sum().backward()
    assert call.calls_without_graph == 0


def test_memory_that_is_written_and_shared_makes_a_call_run_as_it_is() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x * y

    def both(x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        one.add_(1)
        return x * other

    module = Counts()
    call = graphed(module, [(torch.randn(3, requires_grad=True), torch.zeros(3))])
    x = torch.randn(3, requires_grad=True)
    assert torch.equal(module(x, module.count), x)
    assert call.calls_without_graph == 1
    call = graphed(both, [(torch.randn(3, requires_grad=True), torch.zeros(3), torch.zeros(3))])
    cache = torch.zeros(3)
    assert torch.equal(call[0](x, cache, cache.view(3)), x)
    assert call.calls_without_graph == 1
    with pytest.raises(StepRefused, match="writes into tensor 1 of its arguments, which shares memory with tensor 2"):
        graphed(both, [(torch.randn(3, requires_grad=True), cache, cache.view(3))])


def pops(x: torch.Tensor, batch: Any) -> torch.Tensor:
    found: torch.Tensor = x * batch.pop("y")
    return found


def appends(x: torch.Tensor, results: list[Any]) -> torch.Tensor:
    results.append(x * 2)
    return x * 2


def keeps(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cache.copy_(x)
    return cache * 2


def renormalizes(x: torch.Tensor, linear: nn.Linear) -> Any:
    linear.weight.data = torch.renorm(linear.weight.data, 2, 0, 0.1)
    return linear(x)


def trains(x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    loss = linear(x).square().sum()
    loss.backward()
    return loss.detach()


def draws_again(x: torch.Tensor) -> torch.Tensor:
    state = torch.cuda.get_rng_state()
    found = functional.dropout(x, 0.5)
    torch.cuda.set_rng_state(state)
    return found


class Flips:
    """Every other call is another; nothing that can be watched changes."""

    def __init__(self) -> None:
        self.at = iter(range(1000)).__next__

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.at() % 2 else x + 1


REFUSALS: dict[str, tuple[Callable[[], Any], tuple[Any, ...], str]] = {
    "an argument is popped": (lambda: pops, ({"y": torch.ones(3)},), "changes argument 1, a dict that it is given"),
    "an argument grows": (lambda: appends, ([],), "changes argument 1, a list that it is given"),
    "an argument becomes a result": (
        lambda: keeps,
        (torch.zeros(3),),
        "makes tensor 1 of its arguments a result of its own",
    ),
    "an argument with a gradient is written": (
        lambda: nn.ReLU(inplace=True),
        (),
        "writes into an argument that takes part in differentiation",
    ),
    "Python's random numbers": (lambda: lambda x: x * random.random(), (), r"draws random numbers .*\(random\)"),
    "a branch that is rarely taken": (
        lambda: lambda x: x if random.random() < 1e-9 else x * 2,
        (),
        r"draws random numbers on the host \(random\)",
    ),
    "NumPy's random numbers": (lambda: lambda x: x * numpy.random.rand(), (), r"\(numpy\.random\)"),
    "no run is like the one before": (Flips, (), "two calls with equal shapes differ"),
    "a weight's memory is exchanged": (
        lambda: functools.partial(renormalizes, linear=nn.Linear(3, 3)),
        (),
        r"changes .*weight itself \(its requires_grad, shape or memory\)",
    ),
    "a backward inside": (
        lambda: functools.partial(trains, linear=nn.Linear(3, 3)),
        (),
        r"changes the `\.grad` of a parameter",
    ),
    "random numbers drawn again": (lambda: draws_again, (), "keeps the GPU's random state"),
    "a sparse gradient": (lambda: Sparse(), (), "computes a sparse gradient"),
    "a result of before": (lambda: Older(), (), "takes part in differentiation and was computed before the call"),
    "compiled in place": (lambda: in_place(), (), "is compiled in place"),
}


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.table(x.argmax(-1)) * x


class Older(nn.Module):
    """Keeps what was computed of a parameter: its gradient would have to go on from there."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = torch.randn(3, requires_grad=True) * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.condition


def in_place() -> nn.Module:
    module = nn.Linear(3, 3)
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_what_a_graph_could_not_repeat_is_refused_and_leaves_no_trace(name: str) -> None:
    make, further, words = REFUSALS[name]
    function = make()
    linear = function.keywords["linear"] if isinstance(function, functools.partial) else nn.Linear(1, 1)
    before = [parameter.detach().clone() for parameter in linear.parameters()]
    state, of_numpy = random.getstate(), numpy.random.get_state()[2]
    cuda = {"get_rng_state": lambda *_: torch.empty(0), "set_rng_state": lambda *_: None}
    with mock.patch.multiple(torch.cuda, **cuda), pytest.raises(StepRefused, match=f"callable 1 .*{words}|{words}"):
        graphed(function, [(torch.randn(3, requires_grad=True), *further)])
    assert same([*linear.parameters()], before)
    assert all(parameter.grad is None for parameter in linear.parameters())
    assert random.getstate() == state
    assert numpy.random.get_state()[2] == of_numpy
    assert not (isinstance(function, nn.Module) and "forward" in vars(function))


AFTER_STEPS: dict[str, Callable[[nn.Module, list[int]], Any]] = {
    "counts": lambda module, counts: lambda: counts.append(1),
    "binds": lambda module, counts: lambda: setattr(module, "scale", module.scale * 2),
}


@pytest.mark.parametrize("name", sorted(AFTER_STEPS))
def test_what_an_update_changes_in_python_is_refused(name: str) -> None:
    module: Any = nn.Linear(3, 3)
    module.scale = torch.ones(1)
    counts: list[int] = []
    with pytest.raises(StepRefused, match="after_step changes Python's state"):
        graphed(module, batches(1), after_step=AFTER_STEPS[name](module, counts))
    assert module.scale.item() == 1
    assert counts == []


def test_the_update_runs_in_each_step_whether_graphs_served_it_or_not() -> None:
    module = nn.Linear(3, 3)
    updates = torch.zeros(())
    graphed(module, batches(1), after_step=lambda: updates.add_(1))  # type: ignore[arg-type]
    for rows in (2, 4, 4, 2, 4):
        module(torch.randn(rows, 3)).sum().backward()
    with torch.no_grad():
        module(torch.randn(2, 3))
    assert updates.item() == 5


def test_a_forward_of_the_modules_own_comes_back() -> None:
    module = nn.Linear(3, 3)
    stock = module.forward
    mine = lambda x: stock(x) * 2  # noqa: E731
    module.forward = mine  # type: ignore[method-assign]
    x = torch.randn(2, 3)
    expected = module(x)
    call = graphed(module, batches(1))
    assert torch.equal(module(x), expected)
    call.close()
    assert vars(module)["forward"] is mine
    call = graphed(module, batches(1))
    module.forward = stock  # type: ignore[method-assign]
    call.close()
    assert vars(module)["forward"] is stock


def saved_and_loaded(module: nn.Module) -> Any:
    held = io.BytesIO()
    torch.save(module, held)
    held.seek(0)
    return torch.load(held, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "saved and loaded": saved_and_loaded,
    "averaged": lambda module: torch.optim.swa_utils.AveragedModel(module).module,
    "a copy of a copy": lambda module: copy.deepcopy(copy.deepcopy(module)),
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", sorted(COPIES))
def test_a_copy_of_a_graphed_module_is_a_module_of_its_own(name: str, own: bool) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    if own and name != "saved and loaded":
        module.forward = functools.partial(nn.Sequential.forward, module)  # type: ignore[method-assign]
    call = graphed(module, batches(1))
    other = COPIES[name](module)
    with torch.no_grad():
        other[0].weight.zero_()
        other[0].bias.fill_(2.0)
    found = other(torch.randn(2, 3))
    assert torch.equal(found, torch.full((2, 3), 2.0))
    found.sum().backward()
    assert gradients(module) == [None, None]
    assert None not in gradients(other)
    assert [one.replays for one in call.report()] == [0, 0]
    with pytest.raises(TypeError, match="graphs cannot be copied or saved"):
        copy.deepcopy(call)


def test_functions_of_a_group_are_copied_as_the_functions_they_are() -> None:
    weight = torch.ones(3, requires_grad=True)
    call = graphed([functools.partial(torch.mul, weight)], [(torch.randn(3),)])
    other = copy.deepcopy(call[0])
    assert isinstance(other, functools.partial)


def test_modules_that_are_given_twice_are_refused() -> None:
    module = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="callable 2 is callable 1 again: give each once"):
        graphed([module, module], batches(2))


@pytest.mark.parametrize("order", [[1, -1.5], [1.0, -1.0], ["1", "-1"], [True, -1], [1, None]])
def test_an_order_of_anything_but_whole_numbers_is_refused(order: Any) -> None:
    with pytest.raises(WrongOrder, match=r"order\[[01]\] is .*: entries are whole numbers"):
        graphed(nn.Linear(3, 3), batches(1), order=order)


def plain(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, module.weight, module.bias)


def forward_mode(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, direction: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, direction))).tangent


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "vmap": lambda function, x: torch.vmap(function)(x.expand(4, 2, 3)),
    "grad": lambda function, x: torch.func.grad(lambda y: function(y).square().sum())(x),
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x + 1,))[1],
    "jacrev": lambda function, x: torch.func.jacrev(function)(x),
    "forward mode": lambda function, x: forward_mode(function, x, x + 1),
}


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_transforms_go_through_the_function_and_not_its_graphs(name: str) -> None:
    module = nn.Linear(3, 3)
    call = graphed(module, batches(1))
    x = torch.randn(2, 3)
    expected = TRANSFORMS[name](functools.partial(plain, module), x)
    assert torch.allclose(TRANSFORMS[name](module, x), expected)
    module(x).sum().backward()
    assert [one.replays for one in call.report()] == [1, 1]


@pytest.mark.filterwarnings("ignore:callable 1 runs without its graphs")
def test_weights_that_are_passed_for_a_call_are_used() -> None:
    module = nn.Linear(3, 3)
    graphed(module, batches(1))
    weights = {name: torch.ones_like(weight) for name, weight in module.named_parameters()}
    x = torch.randn(2, 3)
    found = torch.func.functional_call(module, weights, (x,))
    assert torch.equal(found, functional.linear(x, weights["weight"], weights["bias"]))


def test_modes_that_watch_operators_see_them() -> None:
    module = nn.Linear(3, 3)
    call = graphed(module, batches(1))
    with FlopCounterMode(display=False) as counter:
        module(torch.randn(2, 3)).sum().backward()
    assert counter.get_total_flops() > 0
    module(torch.randn(2, 3)).sum().backward()
    assert [one.replays for one in call.report()] == [1, 1]


def test_code_that_is_compiled_around_graphed_layers_compiles_the_layers() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    reference = copy.deepcopy(model)
    graphed(nn.ModuleList(model), batches(1, requires_grad=True))
    compiled = torch.compile(model, backend="eager")
    for x in batches(3):
        compiled(x).square().sum().backward()
        reference(x).square().sum().backward()
    assert same(gradients(model), gradients(reference))


AROUND: dict[str, Callable[[], Any]] = {
    "another dtype of autocast": lambda: torch.autocast("cpu", dtype=torch.float16),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "deterministic": lambda: mock.patch.object(torch, "are_deterministic_algorithms_enabled", lambda: True),
}


@pytest.mark.parametrize("name", sorted(AROUND))
def test_settings_around_a_call_are_part_of_what_it_is(name: str) -> None:
    module = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call = graphed(module, [torch.randn(2, 4)])
        x = torch.randn(2, 4)
        module(x).float().sum().backward()
        assert call.calls_without_graph == 0
        with AROUND[name]():
            found = module(x)
            assert torch.equal(found, plain(module, x))
            assert found.dtype == plain(module, x).dtype
        found.float().sum().backward()
        assert call.calls_without_graph >= (name != "deterministic")


def test_graphs_of_inference_mode_serve_there_only() -> None:
    module = nn.Linear(3, 3).eval()
    with torch.inference_mode():
        call = graphed(module, batches(1))
    x = torch.randn(2, 3)
    for mode, without in ((torch.inference_mode, 0), (torch.no_grad, 1)):
        with mode():
            assert torch.equal(module(x), plain(module, x))
        assert call.calls_without_graph == without


Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Result:
    first: torch.Tensor
    rest: Any = None
    number: int = 3


class Structured(nn.Module):
    """Returns all kinds of things, with gradients and without."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return {
            "output": BaseModelOutput(last_hidden_state=y, hidden_states=(y, x)),
            "pair": Pair(y * 2, None),
            "result": Result(y + 1, [y, {"x": x.detach()}]),
            "mask": y > 0,
            "index": y.argmax(-1),
            "text": "text",
            "list": [],
        }


def test_results_of_any_structure_are_made_new_in_each_call() -> None:
    module = Structured()
    reference = copy.deepcopy(module)
    call = graphed(module, batches(1))
    for x in batches(3):
        for one in (module, reference):
            found = one(x)
            found["list"].append(1)
            assert found["list"] == [1]
            assert (found["text"], found["result"].number, found["pair"].second) == ("text", 3, None)
            assert found["mask"].dtype == torch.bool
            assert not found["index"].requires_grad
            parts = found["output"], found["pair"].first, found["result"].rest[0], found["result"].first.exp()
            (
                parts[0].last_hidden_state + parts[0].hidden_states[0].square() + parts[1] + parts[2] + parts[3]
            ).sum().backward()
    assert same(gradients(module), gradients(reference))
    assert call.calls_without_graph == 0


class Scaled(torch.Tensor):
    """Integers and a scale, as quantized weights are kept."""

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype, device=integers.device)

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor) -> None:
        self.integers, self.scale = integers, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].integers, args[0].scale)
        args = [one.integers * one.scale if isinstance(one, Scaled) else one for one in args]
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:callable 1 runs without its graphs")
def test_weights_that_hold_other_tensors_are_looked_into() -> None:
    module = nn.Linear(3, 3)
    weight = Scaled(torch.randint(-5, 5, (3, 3)), torch.tensor(0.5))
    module.weight = nn.Parameter(weight, requires_grad=False)
    held: Any = module.weight
    call = graphed(module, batches(1, requires_grad=True))
    for index, x in enumerate(batches(4, requires_grad=True)):
        if index == 1:
            held.scale.fill_(0.25)  # the graph reads it
        if index == 2:
            held.scale = torch.tensor(2.0)
        found = module(x)
        assert torch.equal(found, functional.linear(x, held.integers * held.scale, module.bias))
        found.sum().backward()
        assert call.calls_without_graph == max(0, index - 1)


@pytest.mark.parametrize(
    "make", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
def test_parametrized_weights_are_computed_in_each_call(make: Callable[[nn.Module], nn.Module]) -> None:
    module = make(nn.Linear(3, 3))
    reference = copy.deepcopy(module)
    call = graphed(module, batches(1))
    for x in batches(3):
        for one in (module, reference):
            one(x).square().sum().backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.sub_(0.1)
    assert same(gradients(module), gradients(reference))
    assert call.calls_without_graph == 0


def test_hooks_of_all_modules_run_once_around_a_graphed_one() -> None:
    module = nn.Linear(3, 3)
    reference = copy.deepcopy(module)
    handle = nn.modules.module.register_module_forward_hook(lambda one, given, result: result * 2)
    try:
        graphed(module, batches(1))
        x = torch.randn(2, 3)
        assert torch.equal(module(x), reference(x))
    finally:
        handle.remove()


def test_a_generator_of_the_programs_own_is_drawn_from_as_in_eager() -> None:
    generator = torch.Generator().manual_seed(1)
    other = torch.Generator().manual_seed(1)
    call = graphed(lambda x: x * torch.rand(3, generator=generator), batches(1, requires_grad=True))
    for x in batches(3, requires_grad=True):
        found = call[0](x)
        assert torch.equal(found, x * torch.rand(3, generator=other))
        found.sum().backward()
    assert call.calls_without_graph == 0


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("amax", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.amax.copy_(torch.maximum(self.amax, x.detach().abs().amax()))
        return functional.dropout(self.norm(self.linear(x)), 0.2, self.training)


SCHEDULES = {
    "interleaved": [1, 1, 2, 2, 1, -2, 1, -2, 2, -1, 2, -1, -2, -2, -1, -1],
    "depth first": [1, 2, -2, -1] * 4,
    "backwards late": [1, 2, 1, 2, -2, 1, -2, 2, -1, 1, -1, -2, 2, -1, -2, -1],
}


def pipeline(stages: Sequence[nn.Module], order: Sequence[int]) -> list[torch.Tensor]:
    torch.manual_seed(7)
    found: list[torch.Tensor] = []
    for step in range(3):
        inputs = [torch.randn(5, 4, requires_grad=True) for _ in range(order.count(1))]
        waiting: dict[int, list[Any]] = {1: [], 2: []}
        between: list[torch.Tensor] = []
        slopes: list[Any] = []
        feed = iter(inputs)
        for entry in order:
            if entry == 1:
                waiting[1].append(stages[0](next(feed)))
                between.append(waiting[1][-1].detach().requires_grad_())
            elif entry == 2:
                given = between.pop(0)
                waiting[2].append((given, stages[1](given).square().mean()))
            elif entry == -2:
                given, loss = waiting[2].pop(0)
                loss.backward()
                slopes.append(given.grad)
                found.append(loss.detach())
            else:
                waiting[1].pop(0).backward(slopes.pop(0))
        found += [one.grad for one in inputs if one.grad is not None]
        for stage in stages:
            with torch.no_grad():
                for parameter in stage.parameters():
                    parameter.sub_(0.1 * (parameter.grad if parameter.grad is not None else 0))
            stage.zero_grad(set_to_none=step != 1)
    return [*found, *(one.detach() for stage in stages for one in [*stage.parameters(), *stage.buffers()])]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_schedules_of_pipelines_give_what_eager_gives(name: str) -> None:
    order = SCHEDULES[name]
    expected = pipeline([Block(1), Block(2)], order)
    stages = [Block(1), Block(2)]
    call = graphed(stages, [(torch.randn(5, 4, requires_grad=True),)] * 2, order=order)
    assert same(pipeline(stages, order), expected)
    assert call.calls_without_graph == 0
