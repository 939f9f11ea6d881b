"""Gradients that were given away in memory of graphs, and got other memory or other readers since."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from callable_programs import give_from_the_first
from simulated_gpu.operators import CpuDevice
from torch import nn

from optimizations import torch_internals
from optimizations.capture.callables.gradient_memory import GradientMemory
from optimizations.capture.callables.graph_callables import graph_callables
from optimizations.capture.callables.graphed import Overwritten
from optimizations.capture.step import graphed_step
from optimizations.weak_registry import WeakRegistry
from tests.optimizations.capture.callables.test_differentiation import gradients, same
from tests.optimizations.capture.callables.test_gradient_memory import alike, forget, memories, pair, trained


@pytest.fixture(autouse=True)
def _no_steps_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed_step, "_steps", WeakRegistry())


def resized(gradient: torch.Tensor) -> None:
    gradient.resize_(50).fill_(3.0)


def without_memory(gradient: torch.Tensor) -> None:
    gradient.untyped_storage().resize_(0)


def written_by_a_larger_result(gradient: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of memory that has another size
        torch.add(torch.zeros(4000), 1, out=gradient)


CHANGES: tuple[Callable[[torch.Tensor], None], ...] = (resized, without_memory, written_by_a_larger_result)


@pytest.mark.parametrize("change", CHANGES)
def test_graphs_with_resized_gradients_are_not_launched(change: Callable[[torch.Tensor], None]) -> None:
    """They would write where a gradient lay, and what lies where it is now would be handed out."""
    modules, references, group, _ = pair(2)
    alike(group, modules, references)
    trained(modules, [torch.randn(2, 3)])
    change(next(gradient for gradient in gradients(modules[1]) if gradient.dim() == 2))
    forget(*modules)
    with pytest.warns(UserWarning, match="resized, as a gradient may have been"):
        for _ in range(3):
            x = torch.randn(2, 3)
            assert torch.equal(trained(modules, [x]), trained(references, [x]))
            assert same(gradients(*modules), gradients(*references))
            forget(*modules, *references)
    assert group.calls_without_graph == 3
    assert [memory.lost for memory in memories(group)] == [False, True]


def test_backward_with_resized_gradients_is_an_error() -> None:
    modules, references, group, _ = pair()
    alike(group, modules, references)
    trained(modules, [torch.randn(2, 3)])
    loss = modules[0](x := torch.randn(2, 3)).square().sum()
    held = gradients(*modules)
    resized(held[0])
    forget(*modules)
    with pytest.raises(Overwritten, match="was resized between"):
        loss.backward()
    assert held[0].eq(3.0).all()
    group.restart()
    with pytest.warns(UserWarning, match="runs without its graphs"):
        trained(modules, [x])
    trained(references, [x])
    assert same(gradients(*modules), gradients(*references))


def test_what_was_cloned_lazily_keeps_what_it_held() -> None:
    """The clone reads the same memory until somebody writes there, which a launch does behind PyTorch's back."""
    modules, references, group, _ = pair()
    alike(group, modules, references)
    found = []
    for several in (modules, references):
        torch.manual_seed(3)
        trained(several, [torch.randn(2, 3)])
        kept = [torch_internals.lazy_clone(one) for one in gradients(several[0])]
        forget(*several)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trained(several, [torch.randn(2, 3)])
        found.append([*kept, *gradients(*several)])
    assert same(*found)


class Halves(nn.Module):
    """The gradients of its parameters are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.factor = (nn.Parameter(torch.randn(3)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.cat([self.first, self.second]).view(2, 3).sum(0) * self.factor


def test_a_hook_may_take_away_what_a_gradient_was_to_be_added_to() -> None:
    """Then it becomes a `.grad`, also where it lies in memory that is never given away."""
    module = Halves()
    reference = copy.deepcopy(module)
    graph_callables([module], [(torch.randn(2, 3),)], device=CpuDevice())
    parameters = dict(module.named_parameters())
    came: list[torch.Tensor] = []

    def forget_all(parameter: torch.Tensor) -> None:
        if not came:
            forget(module)
        came.append(parameter)

    for parameter in parameters.values():
        parameter.grad = torch.ones(3)
        parameter.register_post_accumulate_grad_hook(forget_all)
    xs = [torch.randn(2, 3) for _ in range(3)]
    for x in xs:
        module(x).square().sum().backward()
    assert len(came) == 3 * len(parameters)
    for name, of_reference in reference.named_parameters():
        found = [torch.autograd.grad(reference(x).square().sum(), of_reference)[0] for x in xs]
        expected = sum(found[1:] if parameters[name] is came[0] else found)
        assert torch.allclose(parameters[name].grad, expected)  # type: ignore[arg-type]


def test_held_gradient_may_be_an_argument_of_a_callable(monkeypatch: pytest.MonkeyPatch) -> None:
    give_from_the_first(monkeypatch)
    modules, references, group, _ = pair(2)
    found = []
    for several in (modules, references):
        torch.manual_seed(3)
        trained(several, [torch.randn(2, 3)])
        weight = next(several[1].parameters())
        assert weight.grad is not None
        held = weight.grad[:2]
        forget(*several)
        y = trained(several, [held])
        found.append([y, held, *gradients(*several)])
    assert same(*found)
    assert group.calls_without_graph == 0
    assert group.report()[0].times_put_back > 0 or group.report()[1].times_put_back > 0


def test_memory_that_nobody_has_is_not_lost() -> None:
    gradient = torch.zeros(4)
    memory = GradientMemory("it", [gradient])
    assert not memory.lost
    memory.gives = True
    assert memory.hands_out(gradient, to_add=False)
    assert not memory.lost
    handed = gradient.detach()
    handed.resize_(50)
    assert memory.lost
    del handed
    assert memory.lost
