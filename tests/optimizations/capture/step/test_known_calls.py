"""Calls that match a recording are recognized without a signature, and no other calls are."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import batches, loss_of, network
from transformers import BatchEncoding

from optimizations.capture.signature import replaced, signature
from optimizations.capture.step import call_recorder
from optimizations.capture.step.call import Arguments
from optimizations.capture.step.graphed_step import GraphedStep


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    label: Any


@dataclasses.dataclass
class Alone:
    image: torch.Tensor


Pair = collections.namedtuple("Pair", "first second")
x, y = torch.ones(2, 3), torch.ones(4, dtype=torch.int64)


def known(arguments: tuple[Any, ...], keywords: dict[str, Any] | None = None) -> Arguments:
    tensors: list[torch.Tensor] = []
    signature((arguments, keywords or {}), tensors)
    return Arguments(arguments, keywords or {}, tensors)


NESTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "a tensor": ((x,), {}),
    "several": ((x, y), {}),
    "a dict": (({"x": x, "y": y},), {}),
    "by keyword": ((), {"x": x, "scale": 0.5}),
    "nested": (([x, (y, {"z": x.clone(), "n": None})], "train"), {"pair": Pair(x.clone(), 3)}),
    "nothing": ((), {}),
    "one tensor twice": ((x, [x, y]), {}),
    "a dataclass": ((Sample(x, ({"y": y}, 3)), Alone(x.clone())), {}),
    "other mappings": ((collections.OrderedDict(x=x, y=y), BatchEncoding({"ids": y.clone(), "mask": x.clone()})), {}),
    "a parameter": ((torch.nn.Parameter(x, requires_grad=False),), {}),
}


def another(tensor: torch.Tensor) -> torch.Tensor:
    fresh = torch.zeros_like(tensor)
    return torch.nn.Parameter(fresh, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else fresh


@pytest.mark.parametrize("name", sorted(NESTS))
def test_tensors_of_an_equal_call_match_its_signature(name: str) -> None:
    """It has the same structure and other tensors; equal objects stay equal objects."""
    tensors: list[torch.Tensor] = []
    signature(NESTS[name], tensors)
    made = {id(tensor): another(tensor) for tensor in tensors}
    expected = [made[id(tensor)] for tensor in tensors]
    found = known(*NESTS[name]).tensors_of(*replaced(NESTS[name], iter(expected)))
    assert found is not None and len(found) == len(expected)
    assert all(mine is theirs for mine, theirs in zip(found, expected, strict=True))


class Mine(torch.Tensor):
    pass


OTHERS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "shape": ((x,), (torch.ones(3, 2),)),
    "strides": ((x,), (torch.ones(3, 2).T,)),
    "dtype": ((x,), (x.double(),)),
    "gradient": ((x,), (x.clone().requires_grad_(),)),
    "class": ((x,), (x.as_subclass(Mine),)),
    "parameter": ((x,), (torch.nn.Parameter(x, requires_grad=False),)),
    "no tensor": ((x,), (3,)),
    "something with a shape": ((x,), (x.numpy(),)),
    "more": ((x,), (x, y)),
    "fewer": ((x, y), (x,)),
    "none": ((x,), ()),
    "exchanged": ((x, y), (y, x)),
    "one tensor twice": (([x, x.clone()],), ([x, x],)),
    "no longer the same": (([x, x],), ([x, x.clone()],)),
    "key": (({"x": x},), ({"z": x},)),
    "another dataclass": ((Sample(x, y),), (Alone(x),)),
    "a field": ((Sample(x, 1),), (Sample(x, 2),)),
    "key of a mapping": ((BatchEncoding({"x": x}),), (BatchEncoding({"y": x}),)),
    "order of keys": (({"x": x, "z": x.clone()},), ({"z": x, "x": x.clone()},)),
    "one key more": (({"x": x},), ({"x": x, "z": 1},)),
    "no dict": (({"x": x},), (collections.OrderedDict(x=x),)),
    "list for tuple": (([x],), ((x,),)),
    "named": (([x, y],), (Pair(x, y),)),
    "a longer list": (([x],), ([x, y],)),
    "a longer list with a number": (([x, 1],), ([x, 1, y],)),
    "a shorter list with a number": (([x, 1],), ([x],)),
    "tuple for list with a number": (([x, 1],), ((x, 1),)),
    "number": ((x, 1), (x, 2)),
    "kind of number": ((x, 1), (x, True)),
    "text": ((x, "a"), (x, "b")),
}


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_call_with_another_signature_is_not_known(name: str) -> None:
    ours, theirs = OTHERS[name]
    assert signature((ours, {}), []) != signature((theirs, {}), [])
    arguments = known(ours)
    assert arguments.tensors_of(ours, {}) is not None
    assert arguments.tensors_of(theirs, {}) is None
    assert arguments.tensors_of(ours, {"more": 1}) is None


def test_objects_are_known_by_their_identity() -> None:
    for value, other in (({3: x}, {4: x}), ({1, 2}, {1, 2}), (object(), object())):
        arguments = known((value, x))
        assert arguments.tensors_of((value, x), {}) is not None
        assert arguments.tensors_of((other, x), {}) is None


def counted_signatures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []

    def counting(*arguments: Any) -> Any:
        made.append(1)
        return signature(*arguments)

    monkeypatch.setattr(call_recorder, "signature", counting)
    return made


def test_alternating_recordings_need_no_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, a number, and gradients that are there or not."""
    model = network("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
        loss = loss_of(model, batch) * scale
        loss.backward()
        return loss.detach()

    def calls(function: Callable[..., Any], count: int) -> list[torch.Tensor]:
        found = []
        for index in range(count):
            (batch,) = batches("cpu", 1, 6 + index // 2 % 2)[0]
            found.append(function(batch, 0.5 if index % 4 else 0.25))
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
        return found

    start = [parameter.detach().clone() for parameter in model.parameters()]
    expected = calls(step, 40)
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), start)
    graphed = GraphedStep(step, device=CpuDevice())
    found = calls(graphed, 32)
    made = counted_signatures(monkeypatch)
    found += calls(graphed, 8)
    assert made == []
    assert [loss.item() for loss in found] == [loss.item() for loss in expected]
    assert len(graphed.report().recordings) == 4 and graphed.report().refusals == ()


def test_freed_recording_is_not_replayed() -> None:
    model = network("cpu")
    step = GraphedStep(lambda batch: loss_of(model, batch).detach(), device=CpuDevice())
    calls = batches("cpu")
    for batch in calls[:5]:
        step(*batch)
    assert step.report().replays == 2
    step.close()
    step(*calls[5])
    assert step.report().replays == 2
