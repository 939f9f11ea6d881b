"""What a step returns is nested like what its recording returned, however that is nested."""

from __future__ import annotations

import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from optimizations.capture.signature import flatten, replaced
from optimizations.capture.step import outputs

Pair = namedtuple("Pair", "first second")


@dataclass
class Kept:
    """A dataclass of a program."""

    value: object
    number: int = 3


def nest(draw: random.Random, depth: int) -> Any:
    if depth == 0 or draw.random() < 0.35:
        return torch.zeros(1)
    if draw.random() < 0.15:
        return draw.choice([None, 1, 2.5, "text", True])
    members = [nest(draw, depth - 1) for _ in range(draw.randint(0, 4))]
    named = {f"name {index}": member for index, member in enumerate(members)}
    made: list[Callable[[], Any]] = [
        lambda: members,
        lambda: tuple(members),
        lambda: named,
        lambda: OrderedDict(named),
        lambda: Pair(members, tuple(members[:1])),
        lambda: Kept(members),
    ]
    return draw.choice(made)()


def same(one: Any, other: Any) -> bool:
    """Of the same types, with the very same tensors."""
    if isinstance(one, torch.Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return same(vars(one), vars(other)) if isinstance(one, Kept) else one == other


@pytest.mark.parametrize("seed", range(10))
def test_results_are_nested_like_those_of_the_recording(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        made, tensors = nest(draw, 4), []  # type: ignore[var-annotated]
        flatten(made, tensors)
        given = [torch.zeros(1) for _ in tensors]
        left = iter(given)
        assert same(outputs._maker(made)(left), replaced(made, iter(given)))
        assert next(left, None) is None


def test_nests_are_made_without_reading_their_members(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [torch.zeros(1) for _ in range(4)]
    make = outputs._maker((some[0], [some[1], some[2]], {"last": (some[3],)}))
    monkeypatch.setattr(outputs, "replaced", lambda *arguments: pytest.fail("it looked"))
    assert same(make(iter(some)), (some[0], [some[1], some[2]], {"last": (some[3],)}))
