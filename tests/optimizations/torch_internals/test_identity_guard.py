"""Each way to exchange, insert or delete a tensor of a module is seen, and nothing else is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optimizations.torch_internals import identity_guard
from optimizations.torch_internals.dictionary_writes import writes_left
from optimizations.torch_internals.identity_guard import Exchanged, HeldTensors, NotGuarded, same_tensors


def model() -> Any:
    made = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    made.register_buffer("scale", torch.ones(1))
    return made


def held_by(module: nn.Module, tensors: list[Any]) -> HeldTensors:
    def numbered(found: Any) -> dict[str, int]:
        first = len(tensors)
        tensors.extend(found.values())
        return {name: first + place for place, name in enumerate(found)}

    parameters, buffers = numbered(module._parameters), numbered(module._buffers)
    return HeldTensors(parameters, buffers, {name: held_by(one, tensors) for name, one in module._modules.items()})


def comparison(*modules: nn.Module) -> Callable[[], bool]:
    tensors: list[Any] = []
    made = same_tensors([(module, held_by(module, tensors)) for module in modules], tensors)
    return lambda: bool(tensors) and (made.seen == writes_left() or made.holds())


def exchanged(dictionary: dict[str, Any], name: str) -> None:
    dictionary[name] = nn.Parameter(dictionary[name].detach().clone())


CHANGES: dict[str, Callable[[Any], object]] = {
    "parameter": lambda one: exchanged(one[0]._parameters, "weight"),
    "parameter by attribute": lambda one: setattr(one[1][1], "bias", nn.Parameter(torch.zeros(2))),
    "parameter inserted": lambda one: one[0].register_parameter("other", nn.Parameter(torch.zeros(1))),
    "parameter deleted": lambda one: delattr(one[0], "bias"),
    "parameter deleted and put back": lambda one: one[0]._parameters.update(bias=one[0]._parameters.pop("bias").data),
    "two parameters swapped": lambda one: one[0]._parameters.update(weight=one[0].bias, bias=one[0].weight),
    "parameters cleared": lambda one: one[0]._parameters.clear(),
    "dictionary of parameters": lambda one: one[0].__dict__.update(_parameters=dict(one[0]._parameters)),
    "dictionary of parameters by attribute": lambda one: setattr(one[0], "_parameters", dict(one[0]._parameters)),
    "dictionary of modules by attribute": lambda one: setattr(one, "_modules", dict(one._modules)),
    "begun anew": lambda one: one[0].__init__(2, 2),
    "buffer": lambda one: setattr(one, "scale", torch.ones(1)),
    "buffer of a submodule": lambda one: one[1][0]._buffers.update(running_mean=torch.zeros(2)),
    "buffer deleted": lambda one: delattr(one, "scale"),
    "dictionary of buffers": lambda one: one[1][0].__dict__.update(_buffers=dict(one[1][0]._buffers)),
    "module": lambda one: one[1].__setitem__(1, nn.Linear(2, 2)),
    "module inserted": lambda one: one.append(nn.Linear(2, 2)),
    "module deleted": lambda one: delattr(one[1], "1"),
    "modules swapped": lambda one: one._modules.update({"0": one[1], "1": one[0]}),
    "dictionary of modules": lambda one: one[1].__dict__.update(_modules=dict(one[1]._modules)),
}

KEPT: dict[str, Callable[[Any], object]] = {
    "values": lambda one: one[0].weight.data.add_(1),
    "data": lambda one: setattr(one[0].weight, "data", torch.zeros(2, 2)),
    "attribute": lambda one: setattr(one[1], "number", 3),
    "attribute deleted": lambda one: delattr(one[0], "in_features"),
    "buffer set to itself": lambda one: one._buffers.update(scale=one.scale),
    "buffer that is not read": lambda one: one.register_buffer("other", torch.zeros(1)),
    "dictionary set to itself": lambda one: one[0].__dict__.update(_parameters=one[0]._parameters),
    "mode": lambda one: one.eval(),
    "gradient": lambda one: setattr(one[0].weight, "grad", torch.zeros(2, 2)),
    "contents": lambda one: torch.utils.swap_tensors(one[0].weight, nn.Parameter(torch.zeros(2, 2))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_exchanged_parameter_is_found(change: str) -> None:
    one, other = model(), model()
    same = comparison(one, other)
    assert all(same() for _ in range(4))
    CHANGES[change](other)
    assert not any(same() for _ in range(4)), "and stays seen"


@pytest.mark.parametrize("change", KEPT)
def test_other_change_is_no_exchange(change: str) -> None:
    one = model()
    same = comparison(one)
    for _ in range(3):
        KEPT[change](one) if change != "attribute deleted" or hasattr(one[0], "in_features") else None
        assert all(same() for _ in range(4))
    exchanged(one[1][1]._parameters, "weight")
    assert not same()


@pytest.mark.parametrize("change", ["parameter", "buffer"])
def test_tensor_exchanged_during_creation_is_found(change: str) -> None:
    one = model()
    tensors: list[Any] = []
    held = held_by(one, tensors)
    CHANGES[change](one)
    with pytest.raises(Exchanged):
        same_tensors([(one, held)], tensors)


def test_own_dictionaries_are_refused() -> None:
    one = model()
    one[0].__dict__["_parameters"] = type("Tracking", (dict,), {})(one[0]._parameters)
    with pytest.raises(NotGuarded, match="Linear keeps _parameters in its own way"):
        comparison(one)


def test_many_modules_are_compared() -> None:
    one = nn.Sequential(*(nn.Linear(1, 1) for _ in range(70)))
    same = comparison(one)
    assert same() and same()
    one[69].bias = nn.Parameter(torch.zeros(1))
    assert not same()


@pytest.mark.parametrize("marked", ["mark_tag_safe", "mark_tag_safe_root"])
def test_guards_mark_no_node_as_skipped(marked: str) -> None:
    """PyTorch withdrew recursive marks in 2.12: they read versions of dictionaries that may be freed."""
    assert marked not in inspect.getsource(identity_guard).replace("(`mark_tag_safe_root`)", "")
