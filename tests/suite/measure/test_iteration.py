"""An iteration does exactly what a user's loop does."""

from __future__ import annotations

import pytest
import torch
from tiny_workloads import instance_of

from optimizations.capture.step.host_state import CELL, reach
from suite.measure.iteration import full_precision, iteration, set_numerics


def linear() -> torch.nn.Module:
    return torch.nn.Linear(8, 3)


def test_inference_makes_no_autograd_graph():
    instance = instance_of(linear)
    outcome = iteration(instance, instance.module, marks_steps=False)(instance.inputs(0))
    assert not outcome.output.requires_grad and outcome.loss is None
    torch.testing.assert_close(outcome.output, instance.module(*instance.inputs(0).args))


class Differentiating(torch.nn.Linear):
    """Its forward takes a step down its own gradient, as meta-learning does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(super().forward(x).square().sum(), self.weight)
        return torch.nn.functional.linear(x, self.weight - 0.1 * gradient, self.bias)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_inference_that_differentiates_has_gradients_enabled(mode):
    module = Differentiating(8, 3)
    instance = instance_of(lambda: module, gradients_in_inference=True)
    call = module if mode == "eager" else torch.compile(module, backend="aot_eager")
    with torch.no_grad():
        outcome = iteration(instance, call, marks_steps=False)(instance.inputs(0))
    torch.testing.assert_close(outcome.output, module(*instance.inputs(0).args))
    assert outcome.loss is None and module.weight.grad is None
    torch.compiler.reset()


def test_training_leaves_only_this_iterations_gradients():
    instance = instance_of(linear, task="training", loss=lambda output: output.sum())
    run = iteration(instance, instance.module, marks_steps=False)
    first, second = instance.inputs(0), instance.inputs(1)
    run(first)
    outcome = run(second)
    torch.testing.assert_close(instance.module.weight.grad, second.args[0].sum(0).expand(3, 8))
    torch.testing.assert_close(outcome.loss, outcome.output.sum())


@pytest.mark.parametrize("task", ["inference", "training"])
def test_autocast_surrounds_forward_and_loss_but_not_backward(task):
    seen: dict[str, bool] = {}

    def loss(output: torch.Tensor) -> torch.Tensor:
        seen["loss"] = torch.is_autocast_enabled("cpu")
        output.register_hook(lambda gradient: seen.update(backward=torch.is_autocast_enabled("cpu")))
        return output.float().sum()

    instance = instance_of(linear, dtype_policy="amp", task=task, loss=loss)
    outcome = iteration(instance, instance.module, marks_steps=False)(instance.inputs(0))
    assert outcome.output.dtype == torch.bfloat16
    assert seen == ({"loss": True, "backward": False} if task == "training" else {})


@pytest.mark.parametrize("task", ["inference", "training"])
def test_step_mark_precedes_each_step(monkeypatch, task):
    events: list[str] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: events.append("mark"))
    instance = instance_of(linear, task=task)

    def call(x: torch.Tensor) -> torch.Tensor:
        events.append("call")
        return instance.module(x)

    marked = iteration(instance, call, marks_steps=True)
    marked(instance.inputs(0))
    marked(instance.inputs(1))
    iteration(instance, call, marks_steps=False)(instance.inputs(0))
    assert events == ["mark", "mark", "call", "mark", "call", "call"], "the first where the iteration is made"


def test_tf32_is_allowed_but_not_for_a_reference():
    try:
        torch.backends.cudnn.benchmark = True
        set_numerics()
        assert not torch.backends.cudnn.benchmark, "each process would draw its own algorithms"
        assert torch.get_float32_matmul_precision() == "high"
        with pytest.raises(KeyError), full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
            raise KeyError
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("task", ["inference", "training"])
def test_iteration_depends_on_its_module_alone(task):
    """A captured loop compares everything it can reach on each call, and 900 attributes took 20 us."""
    instance = instance_of(linear, task=task)
    state = reach([("iterate", iteration(instance, instance.module, marks_steps=False))])
    assert instance.module in state.modules.values()
    assert not [one.path for one in state.containers if one.has_attributes and one.names != {CELL}]
