"""Gradients of graphed callables that are given away where graphs write them: who holds them finds them as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from callable_programs import give_from_the_first
from simulated_gpu.operators import CpuDevice
from torch import nn

from optimizations.capture.callables.gradient_memory import (
    PATIENCE,
    ROUNDS,
    TRIES,
    GradientMemory,
    before_launch,
    put_back,
    writable,
)
from optimizations.capture.callables.graph_callables import GraphedCallables, graph_callables
from optimizations.capture.step import graphed_step
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.graph.memory import MemoryRanges, storage_of
from optimizations.weak_registry import WeakRegistry
from tests.optimizations.capture.callables.test_differentiation import batches, gradients, same


@pytest.fixture(autouse=True)
def _no_steps_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed_step, "_steps", WeakRegistry())


class WaitingDevice(CpuDevice):
    """Counts how often the host waits for the device."""

    waited = 0

    def wait(self) -> None:
        self.waited += 1


def trained(modules: Sequence[nn.Module], xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A step of all modules, one behind the other, behind which their gradients are let go of."""
    y = xs[0]
    for module in modules:
        y = module(y)
    y.square().sum().backward()
    return y.detach().clone()


def forget(*modules: nn.Module) -> None:
    for module in modules:
        module.zero_grad(set_to_none=True)


def alike(group: GraphedCallables, modules: Sequence[nn.Module], references: Sequence[nn.Module]) -> None:
    """Steps until the callables give their memory away."""
    for _ in range(ROUNDS + 1):
        x = torch.randn(2, 3)
        assert torch.equal(trained(modules, [x]), trained(references, [x]))
        assert same(gradients(*modules), gradients(*references))
        forget(*modules, *references)
    assert all(memory.gives for memory in memories(group))


def memories(group: GraphedCallables) -> list[GradientMemory]:
    found = [slot.gradient_memory for slot in group._slots.values()]
    return list({id(one): one for one in found if one is not None}.values())


def pair(count: int = 1, **options: Any) -> tuple[list[nn.Module], list[nn.Module], GraphedCallables, WaitingDevice]:
    """Modules, the same without graphs, and the group of those with graphs, which gives its gradients away."""
    device = WaitingDevice()
    modules: list[nn.Module] = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)) for _ in range(count)]
    references = copy.deepcopy(modules)
    samples = [(torch.randn(2, 3, requires_grad=index > 0),) for index in range(count)]
    group = graph_callables(modules, samples, device=device, **options)
    return modules, references, group, device


def copied_bytes(group: GraphedCallables) -> int:
    return sum(one.copied_gradient_bytes for one in group.report())


def test_nothing_is_copied_once_gradients_were_gone_in_time() -> None:
    modules, references, group, device = pair()
    addresses = []
    for step in range(6):
        x = torch.randn(2, 3)
        trained(modules, [x])
        trained(references, [x])
        assert same(gradients(*modules), gradients(*references))
        assert bool(copied_bytes(group)) == (step < ROUNDS)
        addresses.append([one.grad.data_ptr() for one in modules[0].parameters() if one.grad is not None])
        with torch.no_grad():
            for one in (*modules[0].parameters(), *references[0].parameters()):
                one.sub_(0.1 * one.grad)  # type: ignore[operator]
        forget(*modules, *references)
    assert addresses[ROUNDS] == addresses[-1]
    assert device.waited == 0
    assert group.calls_without_graph == 0


def as_list(parameters: Sequence[torch.Tensor]) -> Any:
    return [one.grad for one in parameters]


def as_views(parameters: Sequence[torch.Tensor]) -> Any:
    return [one.grad.view(-1)[1:] for one in parameters if one.grad is not None]


def as_storages(parameters: Sequence[torch.Tensor]) -> Any:
    return [one.grad.untyped_storage() for one in parameters if one.grad is not None]


def as_dlpack(parameters: Sequence[torch.Tensor]) -> Any:
    return [torch.from_dlpack(one.grad) for one in parameters if one.grad is not None]


def as_numpy(parameters: Sequence[torch.Tensor]) -> Any:
    return [one.grad.numpy() for one in parameters if one.grad is not None]


def as_history(parameters: Sequence[torch.Tensor]) -> Any:
    """What autograd saved of them."""
    factor = torch.ones((), requires_grad=True)
    return [(factor, sum((factor * one.grad).sum() for one in parameters if one.grad is not None))]


def as_other_gradients(parameters: Sequence[torch.Tensor]) -> Any:
    others = [torch.zeros_like(one).requires_grad_() for one in parameters]
    for other, one in zip(others, parameters, strict=True):
        other.grad = one.grad
    return [other for other in others if other.grad is not None]


def content(held: Any) -> torch.Tensor:
    if isinstance(held, tuple):
        factor, total = held
        return torch.autograd.grad(total, factor)[0]
    if isinstance(held, torch.UntypedStorage):
        return torch.tensor([]).set_(held)
    if isinstance(held, torch.Tensor):
        return held if held.grad is None else held.grad
    return torch.from_numpy(held)


def with_the_same_draws(*sides: list[nn.Module]) -> Iterator[list[nn.Module]]:
    """Each, with random numbers from the same start."""
    for one in sides:
        torch.manual_seed(3)
        yield one


HOLDS: dict[str, Callable[[Sequence[torch.Tensor]], Any]] = {
    "a list": as_list,
    "views": as_views,
    "storages": as_storages,
    "dlpack": as_dlpack,
    "numpy": as_numpy,
    "a history": as_history,
    "other gradients": as_other_gradients,
}


@pytest.mark.parametrize("name", sorted(HOLDS))
def test_what_holds_a_gradient_keeps_what_it_held(name: str) -> None:
    modules, references, group, device = pair()
    alike(group, modules, references)
    held = []
    for several in with_the_same_draws(modules, references):
        kept: list[Any] = []
        for _ in range(3):
            trained(several, [torch.randn(2, 3)])
            kept += HOLDS[name](list(several[0].parameters()))
            forget(*several)
        trained(several, [torch.randn(2, 3)])
        held.append([*map(content, kept), *gradients(*several)])
    assert same(*held)
    assert group.report()[1].times_put_back > 0
    assert device.waited == 2 * group.report()[1].times_put_back  # readers on any stream: before and behind the launch
    assert group.calls_without_graph == 0


def test_forward_does_not_overwrite_gradients_that_stay() -> None:
    modules, references, group, _ = pair()
    alike(group, modules, references)
    for several in with_the_same_draws(modules, references):
        trained(several, [torch.randn(2, 3)])
        several[0](torch.randn(2, 3))
    assert same(gradients(*modules), gradients(*references))


@pytest.mark.parametrize("zero", ["to none", "in place", "never"])
@pytest.mark.parametrize("order", [[1, -1, 1, -1], [1, 1, -1, 1, -1, -1], [1, 2, -2, 1, -1, 2, -2, -1]])
def test_micro_batches_add_up_in_any_order(zero: str, order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory was given away before: the first micro-batch's is in a `.grad` when the second's are computed."""
    give_from_the_first(monkeypatch)
    modules, references, group, _ = pair(max(order), order=order)
    for step in range(5):
        for several in (modules, references):
            torch.manual_seed(step)
            follow(several, order)
            if zero == "to none":
                forget(*several)
            elif zero == "in place":
                several[0].zero_grad(set_to_none=False)
        assert zero == "to none" or same(gradients(*modules), gradients(*references))
    for several in (modules, references):
        torch.manual_seed(9)
        follow(several, order)
    assert same(gradients(*modules), gradients(*references))
    assert group.calls_without_graph == 0


def follow(modules: Sequence[nn.Module], order: Sequence[int]) -> None:
    """Forwards and backwards of single modules in this order."""
    waiting: dict[int, list[torch.Tensor]] = {}
    for entry in order:
        if entry > 0:
            x = torch.randn(2, 3, requires_grad=entry > 1)
            waiting.setdefault(entry, []).append(modules[entry - 1](x).square().sum())
        else:
            waiting[-entry].pop(0).backward()


def test_accumulation_copies_only_what_becomes_a_gradient() -> None:
    modules, references, group, device = pair(order=[1, -1, 1, -1])
    for step in range(TRIES):
        for several in (modules, references):
            torch.manual_seed(step)
            follow(several, [1, -1])
        assert copied_bytes(group) > 0
        for several in (modules, references):
            follow(several, [1, -1])
            torch.manual_seed(step)
        assert group.report()[3].copied_gradient_bytes == 0
        forget(*modules, *references)
    assert not any(memory.gives for memory in memories(group))
    assert device.waited == 0


def test_a_gradient_that_stays_keeps_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was captured, or noted, of a `.grad` that is added to leads there for good."""
    modules, references, group, _ = pair()
    alike(group, modules, references)
    places = []
    with pytest.warns(UserWarning, match="gradients of callable 1 stay where its graphs write them"):
        for step in range(PATIENCE):
            for several in (modules, references):
                torch.manual_seed(step)
                trained(several, [torch.randn(2, 3)])
            places.append([one.grad.data_ptr() for one in modules[0].parameters() if one.grad is not None])
            assert same(gradients(*modules), gradients(*references))
    assert all(place == places[0] for place in places)


def test_once_a_gradient_was_held_gradients_are_copied_again() -> None:
    modules, references, group, device = pair()
    alike(group, modules, references)
    trained(modules, [torch.randn(2, 3)])
    held = gradients(*modules)
    forget(*modules)
    for _ in range(2):
        trained(modules, [torch.randn(2, 3)])
        forget(*modules)
    assert device.waited > 0
    held.clear()
    trained(modules, [torch.randn(2, 3)])
    forget(*modules)
    device.waited = 0
    for _ in range(ROUNDS + 2):
        trained(modules, [torch.randn(2, 3)])
        assert copied_bytes(group) > 0
        forget(*modules)
    assert device.waited == 0


def test_callable_of_the_same_pool_leaves_held_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second callable's gradients may lie where graphs of the first compute: that memory was free."""
    give_from_the_first(monkeypatch)
    order = [1, -1, 2, -2]
    modules, references, group, _ = pair(2, order=order)
    first, second = memories(group)
    slots = group._slots
    assert slots[1, 0].pool == slots[2, 0].pool
    assert slots[1, 0].forward_overwrites == [first, second]
    assert slots[1, 0].backward_overwrites == [second, first] or slots[1, 0].backward_overwrites == [first, second]
    assert slots[2, 0].forward_overwrites == [second]
    assert slots[2, 0].backward_overwrites == [second]
    held: list[list[Any]] = []
    for several in with_the_same_draws(modules, references):
        follow(several, order)
        kept = gradients(several[1])
        forget(*several)
        follow(several, [1, -1])
        held.append([*kept, *gradients(several[0])])
    assert same(*held)


def test_parameters_that_two_callables_share_get_the_sum() -> None:
    device = WaitingDevice()
    modules = [nn.Linear(3, 3), nn.Linear(3, 3)]
    modules[1].weight = modules[0].weight
    references = copy.deepcopy(modules)
    group = graph_callables(modules, [(torch.randn(2, 3),), (torch.randn(2, 3, requires_grad=True),)], device=device)
    for _ in range(ROUNDS + 3):
        x = torch.randn(2, 3)
        trained(modules, [x])
        trained(references, [x])
        assert same(gradients(*modules), gradients(*references))
        forget(*modules, *references)
    assert any(memory.gives for memory in memories(group))
    assert group.calls_without_graph == 0


def ask(module: nn.Module, x: torch.Tensor, kept: list[Any]) -> None:
    kept += torch.autograd.grad(module(x).square().sum(), list(module.parameters()))


def hook(module: nn.Module, x: torch.Tensor, kept: list[Any]) -> None:
    handles = [one.register_hook(kept.append) for one in module.parameters()]
    module(x).square().sum().backward()
    for handle in handles:
        handle.remove()
    kept.sort(key=lambda one: (one.dim(), float(one.sum())))


def hook_behind(module: nn.Module, x: torch.Tensor, kept: list[Any]) -> None:
    """Which takes the gradient, as an optimizer that steps in the backward does."""

    def take(parameter: torch.Tensor) -> None:
        kept.append(parameter.grad)
        parameter.grad = None

    handles = [one.register_post_accumulate_grad_hook(take) for one in module.parameters()]
    module(x).square().sum().backward()
    for handle in handles:
        handle.remove()
    kept.sort(key=lambda one: (one.dim(), float(one.sum())))


def ask_for_some(module: nn.Module, x: torch.Tensor, kept: list[Any]) -> None:
    some = next(module.parameters())
    module(x).square().sum().backward(inputs=[some])
    kept.append(some.grad)


def retain(module: nn.Module, x: torch.Tensor, kept: list[Any]) -> None:
    module(x).square().sum().backward(retain_graph=True)
    kept += gradients(module)


def hook_of_node(module: nn.Module, x: torch.Tensor, kept: list[Any]) -> None:
    nodes = [one.view_as(one).grad_fn.next_functions[0][0] for one in module.parameters()]  # type: ignore[union-attr]
    for node in nodes:
        node.register_prehook(lambda found: kept.append(found[0]))
    module(x).square().sum().backward()
    kept.sort(key=lambda one: (one.dim(), float(one.sum())))


COPIED = {"asked for": ask, "hooks": hook, "hooks of nodes": hook_of_node}
PUT_BACK = {"hooks behind": hook_behind, "of some": ask_for_some, "retained": retain}


@pytest.mark.parametrize("name", sorted({**COPIED, **PUT_BACK}))
def test_whoever_gets_a_gradient_keeps_it(name: str) -> None:
    modules, references, group, _ = pair()
    alike(group, modules, references)
    found = []
    for several in with_the_same_draws(modules, references):
        kept: list[list[Any]] = []
        for x in batches(4):
            kept.append([])
            {**COPIED, **PUT_BACK}[name](several[0], x, kept[-1])
            forget(*several)
        trained(several, [torch.randn(2, 3)])
        found.append([*(one for some in kept for one in some), *gradients(*several)])
    assert same(*found)
    assert bool(group.report()[1].times_put_back) == (name in PUT_BACK)


def test_under_create_graph_gradients_are_copies() -> None:
    modules, references, group, _ = pair()
    alike(group, modules, references)
    for several in with_the_same_draws(modules, references):
        several[0](torch.randn(2, 3)).square().sum().backward(create_graph=True)
    assert copied_bytes(group) > 0
    assert all(torch.equal(one, other) for one, other in zip(gradients(*modules), gradients(*references), strict=True))


def test_copied_outputs_are_copied_gradients_too() -> None:
    modules, _, group, _ = pair(outputs="copied")
    for _ in range(ROUNDS + 3):
        trained(modules, [torch.randn(2, 3)])
        assert copied_bytes(group) > 0
        forget(*modules)
    assert not any(memory.gives for memory in memories(group))


def test_calls_on_a_second_stream_wait_once_for_readers() -> None:
    modules, references, group, device = pair()
    alike(group, modules, references)
    trained(modules, [torch.randn(2, 3)])
    device.stream = 1
    modules[0](torch.randn(2, 3))  # with the gradients of the first stream there
    forget(*modules)  # which may still read them
    device.waited = 0
    trained(modules, [torch.randn(2, 3)])
    assert device.waited == 1
    forget(*modules)
    for step in range(ROUNDS + 2):
        device.stream = step % 2
        trained(modules, [torch.randn(2, 3)])
        assert copied_bytes(group) > 0
        forget(*modules)
    assert device.waited == 1


class OfTheProgram(torch.autograd.Function):
    """Whose gradient of a parameter is a tensor of the program's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return x * weight

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        return tangents[0] * 2, ctx.gradient, None


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.register_buffer("fixed", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = OfTheProgram.apply(x * self.other, self.weight, self.fixed)
        return found


def test_memory_of_the_program_is_never_given_away() -> None:
    module = Fixed()
    graph_callables([module], [(torch.randn(2, 3),)], device=CpuDevice())
    for _ in range(ROUNDS + 3):
        trained([module], [torch.randn(2, 3)])
        assert module.weight.grad is not None
        assert module.weight.grad.tolist() == [0.0, 1.0, 2.0]
        module.weight.grad.zero_()
        forget(module)
    assert module.fixed.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("before", [True, False])
def test_gradients_next_to_a_graph_step_are_copies(before: bool) -> None:
    modules, references, group, device = pair()
    steps = []

    def make() -> None:
        for several in (modules, references):
            optimizer = torch.optim.SGD(several[0].parameters(), lr=0.1)
            steps.append(GraphedStep(optimizer.step, device=CpuDevice()) if several is modules else optimizer.step)

    if before:
        make()
    else:
        alike(group, modules, references)
        make()
    for index in range(12):
        for several, step in zip((modules, references), steps, strict=True):
            torch.manual_seed(index)
            trained(several, [torch.randn(2, 3)])
            step()
        assert same(gradients(*modules), gradients(*references))
        assert same(list(modules[0].parameters()), list(references[0].parameters()))
        assert copied_bytes(group) > 0
        forget(*modules, *references)
    assert steps[0].report().recordings
    assert device.waited == 0


class Marked(nn.Parameter):
    """A class of the program's own, which may do anything when it gets a gradient."""


def test_parameters_of_other_classes_get_copies() -> None:
    module = nn.Linear(3, 3)
    module.weight = Marked(module.weight.detach())
    group = graph_callables([module], [(torch.randn(2, 3),)], device=CpuDevice())
    for _ in range(ROUNDS + 2):
        trained([module], [torch.randn(2, 3)])
        forget(module)
    assert copied_bytes(group) == module.weight.nbytes


def in_memory(tensors: Sequence[torch.Tensor]) -> MemoryRanges:
    return MemoryRanges(storage_of(one) for one in tensors)


def test_writable_memory_lies_in_the_pool_and_is_not_read() -> None:
    pool = [torch.zeros(4) for _ in range(3)]
    both = torch.zeros(4)
    turned = torch.zeros(2, dtype=torch.complex64).conj()
    found = writable(
        [None, *pool, torch.zeros(4), both[:2], both[2:], torch.empty(0), turned],
        in_memory([*pool, both, turned]),
        {pool[1].untyped_storage().data_ptr()},
    )
    assert [id(one) for one in found] == [id(pool[0]), id(pool[2])]


def test_memory_held_from_the_beginning_is_never_donated() -> None:
    alone, held = torch.zeros(4), torch.zeros(4)
    view = held.view(2, 2)
    memory = GradientMemory("it", [alone, held])
    memory.gives = True
    assert memory.hands_out(alone, to_add=False)
    assert not memory.hands_out(held, to_add=False)
    assert memory.hands_out(alone, to_add=True)
    assert not memory.hands_out(held, to_add=True)  # a hook may take away what it is added to
    assert view.shape == (2, 2)


def test_addends_still_in_use_make_additions_copies() -> None:
    gradient = torch.zeros(4)
    memory = GradientMemory("it", [gradient])
    assert memory.hands_out(gradient, to_add=True)
    waiting = gradient.detach()
    kept = before_launch([memory], nothing)
    gradient.fill_(1.0)
    assert not memory.hands_out(gradient, to_add=True)
    put_back(kept, nothing)
    assert not waiting.any()
    del waiting, kept
    assert before_launch([memory], nothing) == []
    assert not memory.hands_out(gradient, to_add=True)


def nothing() -> None:
    """No device to wait for."""


def test_host_waits_at_most_twice_for_a_launch() -> None:
    waited = []
    tensors = [torch.zeros(4) for _ in range(3)]
    memories = [GradientMemory("it", [one]) for one in tensors]
    for memory, one in zip(memories, tensors, strict=True):
        assert memory.hands_out(one, to_add=True)
    held = [one.detach() for one in tensors]
    kept = before_launch(memories, lambda: waited.append("before"))
    for one in tensors:
        one.fill_(1.0)
    put_back(kept, lambda: waited.append("behind"))
    assert waited == ["before", "behind"]
    assert not any(one.any() for one in held)


def test_what_is_held_outlives_the_graphs() -> None:
    modules, references, group, _ = pair()
    alike(group, modules, references)
    for several in with_the_same_draws(modules, references):
        trained(several, [torch.randn(2, 3)])
    held, expected = gradients(*modules), gradients(*references)
    group.close()
    forget(*modules)
    trained(modules, [torch.randn(2, 3)])
    assert same(held, expected)


def test_launch_without_memory_overwrites_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    modules, references, group, _ = pair()
    alike(group, modules, references)
    for several in with_the_same_draws(modules, references):
        trained(several, [torch.randn(2, 3)])
    held, expected = gradients(*modules), gradients(*references)
    forget(*modules)
    result = modules[0](torch.randn(2, 3))

    def fails(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patches:
        patches.setattr(torch.UntypedStorage, "clone", fails)
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            result.sum().backward()
    assert same(held, expected)


def test_gradients_that_came_back_late_are_copied_for_good() -> None:
    """Within the first backwards it is seen whether a program lets go of them; a step later than that it is not."""
    modules, _, group, _ = pair()
    for _ in range(TRIES + 1):
        trained(modules, [torch.randn(2, 3)])
        modules[0](torch.randn(2, 3))  # gradients are there when the forward is launched
        group.restart()
        forget(*modules)
    for _ in range(ROUNDS + 2):
        trained(modules, [torch.randn(2, 3)])
        forget(*modules)
    assert not any(memory.gives for memory in memories(group))


def test_an_exception_that_is_kept_holds_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    modules, references, group, _ = pair()
    alike(group, modules, references)
    trained(modules, [torch.randn(2, 3)])
    held = gradients(*modules)
    forget(*modules)
    result = modules[0](torch.randn(2, 3))

    def fails(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patches:
        patches.setattr(torch, "empty_like", fails)
        with pytest.raises(torch.OutOfMemoryError, match="no memory") as kept:
            result.sum().backward()
    (memory,) = memories(group)
    assert held and memory.before_launch()
    held.clear()
    assert not memory.before_launch()
    assert kept.value.__traceback__ is not None
