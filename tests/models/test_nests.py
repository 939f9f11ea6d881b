from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from typing import Any

import numpy
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from models.nests import CannotRebuild, leaves_of, map_tensors, tensors_of

A, B = torch.ones(2), torch.zeros(3)


def test_tensors_are_listed_in_order_with_repetitions() -> None:
    found = list(tensors_of((A, {"x": [B, A], "y": 3}, "text")))
    assert [id(tensor) for tensor in found] == [id(A), id(B), id(A)]


def test_repeated_tensor_is_replaced_by_one_tensor() -> None:
    calls = []

    def change(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        return tensor + 1

    mapped = map_tensors({"x": A, "y": [A, B]}, change)
    assert mapped["x"] is mapped["y"][0]
    assert len(calls) == 2
    assert torch.equal(mapped["y"][1], torch.ones(3))


class OfSize(list):
    """A list whose constructor wants something else than members."""

    def __init__(self, members: Any, size: int) -> None:
        super().__init__(members)
        self.size = size


class OfKeywords(dict):
    def __init__(self, *, needed: int, **members: Any) -> None:
        super().__init__(**members)
        self.needed = needed


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Record:
    left: Any
    right: Any = None
    later: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.alias = self.left


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    left: Any
    right: Any = None


class OfAttrs:
    """A class with slots, as attrs creates it."""

    __slots__ = ("left", "right")
    __attrs_attrs__ = (types.SimpleNamespace(name="left"), types.SimpleNamespace(name="right"))

    def __init__(self, left: Any) -> None:
        self.left, self.right = left, 5


CONTAINERS = {
    "a list": [A, 5],
    "a list with a constructor": OfSize([A, 5], size=2),
    "UserList": UserList([A, 5]),
    "deque": deque([A, 5], maxlen=2),
    "a tuple": (A, 5),
    "a named tuple": Pair(A, 5),
    "what an operator returns": torch.return_types.max((A, B)),
    "a dict": {"x": A, "y": 5},
    "OrderedDict": OrderedDict(x=A, y=5),
    "defaultdict": defaultdict(list, x=A, y=5),
    "UserDict": UserDict(x=A, y=5),
    "a dict with a constructor": OfKeywords(needed=2, x=A, y=5),
    "a dataclass": Record(A, 5),
    "a frozen dataclass with slots": Frozen(A, 5),
    "a class of attrs": OfAttrs(A),
    "nested": [Frozen(Pair(deque([A]), 5))],
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_container_keeps_its_class_and_other_entries(name: str) -> None:
    nest = CONTAINERS[name]
    tensors, others = list(tensors_of(nest)), [leaf for leaf in leaves_of(nest) if not isinstance(leaf, torch.Tensor)]
    assert tensors and all(tensor is A or tensor is B for tensor in tensors)
    mapped = map_tensors(nest, torch.neg)
    assert type(mapped) is type(nest)
    assert [leaf for leaf in leaves_of(mapped) if not isinstance(leaf, torch.Tensor)] == others
    for tensor, before in zip(tensors_of(mapped), tensors, strict=True):
        assert torch.equal(tensor, -before)
    assert all(one is other for one, other in zip(tensors_of(nest), tensors, strict=True)), "the old one is as it was"


def test_attributes_of_a_container_are_kept() -> None:
    assert map_tensors(CONTAINERS["a list with a constructor"], torch.neg).size == 2
    assert map_tensors(CONTAINERS["a dict with a constructor"], torch.neg).needed == 2
    assert map_tensors(CONTAINERS["deque"], torch.neg).maxlen == 2
    assert map_tensors(CONTAINERS["defaultdict"], torch.neg)["new"] == []
    record = map_tensors(CONTAINERS["a dataclass"], torch.neg)
    assert record.alias is record.left and not hasattr(record, "later")


def test_packed_sequences_keep_their_lengths() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    mapped = map_tensors(packed, lambda tensor: tensor if tensor.dtype == torch.int64 else -tensor)
    assert type(mapped) is PackedSequence
    assert torch.equal(mapped.data, -packed.data) and mapped.batch_sizes is packed.batch_sizes
    assert mapped.sorted_indices is None


def test_object_that_is_no_container_is_returned_unchanged() -> None:
    class Holder:
        def __init__(self) -> None:
            self.tensor = A

    once = iter([A])
    for leaf in (None, "text", b"bytes", 3, numpy.ones(2), once, Holder(), {A}, Record, torch.nn.Linear(2, 2)):
        assert map_tensors(leaf, torch.neg) is leaf
        assert list(tensors_of([leaf])) == []
    assert next(once) is A, "what can be read once only is not read"


def test_lists_and_dicts_are_copied_and_tuples_may_be_empty() -> None:
    nest: Any = ((), [], {}, [A])
    mapped = map_tensors(nest, torch.neg)
    assert mapped[:3] == nest[:3]
    assert mapped[1] is not nest[1] and mapped[2] is not nest[2]


def test_cyclic_and_repeated_containers_keep_their_form() -> None:
    shared, record = OfSize([A], size=1), Record(A)
    record.right = record
    mapped = map_tensors([shared, shared, record], torch.neg)
    assert mapped[0] is mapped[1] and mapped[0] is not shared
    assert mapped[2].right is mapped[2] and mapped[2].left is mapped[0][0]
    assert [id(tensor) for tensor in tensors_of(record)] == [id(A), id(A)]


class Copyless(list):
    def __deepcopy__(self, memo: Any) -> Copyless:
        raise RuntimeError("no copies")


class Labelled(tuple):
    """A tuple whose constructor wants something else than members."""

    def __new__(cls, label: str, *members: Any) -> Labelled:
        return super().__new__(cls, members)


class Rounding(dict):
    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        super().__setitem__(key, value.round())


REFUSED = [Copyless([A]), Labelled("name", A), Rounding(x=A), types.MappingProxyType({"x": A})]


@pytest.mark.parametrize("nest", REFUSED, ids=lambda nest: type(nest).__name__)
def test_container_that_rejects_other_tensors_is_refused(nest: Any) -> None:
    before = list(tensors_of(nest))
    with pytest.raises(CannotRebuild, match=r"a container cannot be (given other tensors|copied \()"):
        map_tensors([nest], torch.neg)
    assert all(one is other for one, other in zip(tensors_of(nest), before, strict=True))
