"""Inputs as they were recorded, which are made when somebody asks for them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from optimizations.trees.borrowed import Borrowed


def look(tensor: torch.Tensor) -> dict[str, Any]:
    return {"shape": tensor.shape, "value": float(tensor.flatten()[0])}


def make(noted: Mapping[str, Any]) -> torch.Tensor:
    return torch.full(noted["shape"], noted["value"])


def test_a_tensor_is_made_once_when_it_is_asked_for() -> None:
    made: list[float] = []

    def counting(noted: Mapping[str, Any]) -> torch.Tensor:
        made.append(noted["value"])
        return make(noted)

    inputs = Borrowed([torch.ones(2), 7, None, torch.full((3,), 4.0)], look, counting)
    assert len(inputs) == 4
    assert [inputs.is_tensor(index) for index in range(4)] == [True, False, False, True]
    assert made == []
    assert inputs[3] is inputs[-1] is inputs[3]
    assert made == [4.0]
    assert inputs[1:3] == [7, None]
    assert [one.shape if isinstance(one, torch.Tensor) else one for one in inputs] == [(2,), 7, None, (3,)]
    assert made == [4.0, 1.0]
    with pytest.raises(IndexError):
        inputs[4]


def test_the_tensors_that_were_looked_at_are_not_held() -> None:
    tensor = torch.ones(2)
    reference = weakref.ref(tensor)
    inputs = Borrowed([tensor], look, make)
    del tensor
    assert reference() is None
    assert inputs[0].tolist() == [1.0, 1.0]
