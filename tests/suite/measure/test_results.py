"""Results of an iteration are collected by name, from a state that all checked iterations share."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from tiny_workloads import instance_of, normal_inputs
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from models.registry import Inputs
from suite.measure.iteration import IterationOutput, iteration
from suite.measure.results import Results, State, named_tensors, run_checked


def test_tensors_in_transformers_outputs_and_caches_have_names():
    cache = DynamicCache()
    cache.update(torch.full((1, 1, 2, 2), 3.0), torch.full((1, 1, 2, 2), 4.0), 0)
    output = CausalLMOutputWithPast(loss=torch.tensor(1.0), logits=torch.ones(2), past_key_values=cache)
    found = dict(named_tensors(output))
    assert float(found["['loss']"]) == 1.0
    keys = next(tensor for name, tensor in found.items() if name.endswith(".keys"))
    values = next(tensor for name, tensor in found.items() if name.endswith(".values"))
    assert keys.unique().tolist() == [3.0] and values.unique().tolist() == [4.0]


def test_numbers_count_as_tensors_and_cycles_end():
    class Node:
        def __init__(self) -> None:
            self.value = 7
            self.itself = self

    found = dict(named_tensors((Node(), [True, None, "text"])))
    assert {name: tensor.item() for name, tensor in found.items()} == {"[0].value": 7, "[1][0]": True}


class Sized(list[Any]):
    pass


class Named(dict[str, Any]):
    pass


@dataclasses.dataclass(slots=True)
class Slotted:
    tensor: torch.Tensor


def test_tensors_in_custom_containers_have_names():
    one = torch.ones(2)
    packed = torch.nn.utils.rnn.pack_sequence([one])
    containers = {"list": Sized([one]), "dict": Named(x=one), "slots": Slotted(one), "packed": packed}
    found = {name for name, tensor in named_tensors(containers) if tensor.is_floating_point()}
    assert found == {"['list'][0]", "['dict']['x']", "['slots'].tensor", "['packed'].data"}


def test_writes_to_inputs_in_custom_containers_are_restored():
    class Writing(torch.nn.Module):
        def forward(self, given: Sized) -> torch.Tensor:
            return given[0].mul_(2)

    inputs = Inputs(args=(Sized([torch.ones(2)]),))
    instance = instance_of(Writing)
    run, state = iteration(instance, instance.module, marks_steps=False), State(instance.module, inputs)
    results = run_checked(instance, run, inputs, state, seed=0)
    assert results.tensors["input [0][0]"].tolist() == [2, 2]
    assert inputs.args[0][0].tolist() == [1, 1]


def test_digests_distinguish_bits_dtype_shape_and_name():
    base = torch.tensor([1.0, 2.0])
    different = [
        {"a": base},
        {"a": torch.tensor([1.0, 2.0000002])},
        {"a": base.view(torch.int32)},
        {"a": base.reshape(2, 1)},
        {"b": base},
        {"a": base, "b": base},
        {"a": torch.tensor([0.0, 2.0])},
        {"a": torch.tensor([-0.0, 2.0])},
    ]
    assert len({Results(tensors).digest() for tensors in (*different, {"a": base.clone()})}) == len(different)


class Stateful(torch.nn.Module):
    """Counts its calls in a buffer, doubles its input in place, drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("constant", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x.mul_(2.0)
        return torch.nn.functional.dropout(self.linear(x), 0.5)


def test_checked_iterations_start_alike_and_leave_nothing():
    instance = instance_of(Stateful, task="training", loss=lambda output: output.square().mean())
    inputs = instance.inputs(0)
    before = inputs.args[0].clone()
    address = inputs.args[0].data_ptr()
    state = State(instance.module, inputs)
    iterate = iteration(instance, instance.module, marks_steps=False)
    first, second = (run_checked(instance, iterate, inputs, state, seed=5) for _ in range(2))

    assert first.digest() == second.digest()
    assert run_checked(instance, iterate, inputs, state, seed=6).digest() != first.digest()  # dropout
    assert set(first.tensors) == {
        "output", "loss", "gradient linear.weight", "gradient linear.bias", "buffer calls", "input [0]",
    }  # fmt: skip
    assert int(first.tensors["buffer calls"]) == 1
    torch.testing.assert_close(first.tensors["input [0]"], 2 * before)

    assert torch.equal(inputs.args[0], before) and inputs.args[0].data_ptr() == address
    assert int(instance.module.calls) == 0
    assert all(parameter.grad is None for parameter in instance.module.parameters())


def test_results_share_no_memory_with_the_next_call():
    kept = torch.zeros(3)  # as the fixed output memory of a CUDA graph

    def iterate(inputs: Inputs) -> IterationOutput:
        kept.add_(1.0)
        return IterationOutput(kept, None)

    instance = instance_of(torch.nn.Identity, normal_inputs(2))
    inputs = instance.inputs(0)
    state = State(instance.module, inputs)
    first = run_checked(instance, iterate, inputs, state, seed=0)
    run_checked(instance, iterate, inputs, state, seed=0)
    assert first.tensors["output"].tolist() == [1.0, 1.0, 1.0]


def test_nan_in_the_state_is_not_taken_for_a_change():
    module = torch.nn.Module()
    module.register_buffer("mask", torch.tensor([float("nan"), 1.0]))
    state = State(module, Inputs(args=(torch.tensor([float("nan")]),)))
    assert state.changed() == {}
    module.mask[1] = 2.0
    assert list(state.changed()) == ["buffer mask"]
    state.restore()
    assert state.changed() == {}
