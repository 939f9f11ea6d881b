"""A step may return something that is no tensor. If it differs in each call, the refusal names where it stands."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from optimizations.capture.other_results import MOST_LETTERS, other_result
from optimizations.capture.signature import flatten

X = torch.ones(2)


class Cache:
    """An object of a library, another one in each call."""


class Pair(NamedTuple):
    loss: Any
    cache: Any


@dataclass
class Output:
    loss: Any
    cache: Any = None


def told(before: Any, now: Any) -> str:
    reason = other_result(flatten(before, []), flatten(now, [])).reason
    begin = "returns something else than a tensor that differs from call to call: "
    assert reason.startswith(begin)
    return reason.removeprefix(begin)


OBJECTS = {
    "alone": (lambda: Cache(), "`result`, an object of Cache"),
    "a tuple": (lambda: (X, Cache()), "`result[1]`, an object of Cache"),
    "a list in a dict": (lambda: {"loss": X, "kept": [X, 1, Cache()]}, "`result['kept'][2]`, an object of Cache"),
    "a mapping of a class": (
        lambda: OrderedDict(loss=X, past_key_values=Cache()),
        "`result['past_key_values']`, an object of Cache",
    ),
    "a namedtuple": (lambda: Pair(X, Cache()), "`result[1]`, an object of Cache"),
    "a dataclass": (lambda: Output(X, Cache()), "`result.cache`, an object of Cache"),
    "a dataclass in a list": (lambda: [X, Output((X, Cache()))], "`result[1].loss[1]`, an object of Cache"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_is_named_by_where_it_stands(name: str) -> None:
    make, expected = OBJECTS[name]
    assert told(make(), make()) == expected


OTHERS = {
    "a number": ((X, 0.25), (X, 0.5), "`result[1]`, 0.5 where the call before gave 0.25"),
    "a zero": ({"a": 1.0}, {"a": 0.0}, "`result['a']`, 0.0 where the call before gave 1.0"),
    "a text": ([X, "a"], [X, "b"], "`result[1]`, 'b' where the call before gave 'a'"),
    "a field": (Output(X, 1), Output(X, 2), "`result.cache`, 2 where the call before gave 1"),
    "one that is a tensor in another call": ((X, 1), (X, X), "`result[1]`"),
    "more members": ([X], [X, X], "`result`"),
    "other keys": ({"a": X}, {"b": X}, "`result`"),
    "another class": ((X,), [X], "`result`"),
    "other fields": (Output(X, (1, 2)), Output(X, (1, 3)), "`result.cache[1]`, 3 where the call before gave 2"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_is_told(name: str) -> None:
    before, now, expected = OTHERS[name]
    assert told(before, now) == expected


def test_a_long_text_is_told_in_part() -> None:
    assert told("a", "b" * 1000) == f"`result`, {repr('b' * 1000)[:MOST_LETTERS]}... where the call before gave 'a'"
