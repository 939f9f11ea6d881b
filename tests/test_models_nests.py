from __future__ import annotations

from collections import namedtuple

import torch

from models.nests import map_tensors, tensors_of

A, B = torch.ones(2), torch.zeros(3)


def test_tensors_come_in_order_and_as_often_as_they_stand() -> None:
    found = list(tensors_of((A, {"x": [B, A], "y": 3}, "text")))
    assert [id(tensor) for tensor in found] == [id(A), id(B), id(A)]


def test_a_tensor_that_stands_twice_is_changed_once_and_stays_one_object() -> None:
    calls = []

    def change(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        return tensor + 1

    mapped = map_tensors({"x": A, "y": [A, B]}, change)
    assert mapped["x"] is mapped["y"][0]
    assert len(calls) == 2
    assert torch.equal(mapped["y"][1], torch.ones(3))


def test_containers_and_other_values_stay() -> None:
    pair = namedtuple("pair", "left right")
    mapped = map_tensors((pair(A, 5), [None, "text"]), torch.neg)
    assert isinstance(mapped[0], pair)
    assert mapped[0].right == 5
    assert mapped[1] == [None, "text"]
