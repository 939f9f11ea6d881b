"""Copies of results that a program keeps, laid out once for each recording.

A call that copies is a call of a program that holds each result until it has the next, such as a loop that decodes
token by token and names its result. Where such a loop waits for nothing, the host's time behind the launch counts as
much as that before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations import torch_internals

MANY_COPIES = 4
"""As many results are copied by one call, with a kernel for many at a time, instead of one by one."""


@dataclass(frozen=True, slots=True)
class CopiesOut:
    """How the results of one recording that the program keeps are copied.

    Attributes:
        count, bytes: how many they are, and of how many bytes.
        make: puts copies in their places in a list of results: in all of them, or in none where it raises. None where
            some of them share memory or have gaps.
    """

    count: int
    bytes: int
    make: Callable[[list[Any]], None] | None


def copies_out(results: Sequence[Any], kept: Collection[int], lone: Collection[int]) -> CopiesOut:
    """Lay out copies of the results at the places `kept`; those at the places `lone` share memory with nothing and fill
    it without gaps."""
    places = sorted(kept)
    if not all(place in lone for place in places):
        return CopiesOut(len(places), 0, None)
    return CopiesOut(len(places), sum(results[place].nbytes for place in places), _copying(places))


def _copying(places: Sequence[int]) -> Callable[[list[Any]], None]:
    if len(places) == 1:
        (place,) = places

        def copy_one(results: list[Any]) -> None:
            results[place] = results[place].clone()

        return copy_one

    def copy_each(results: list[Any]) -> None:
        made = copies_of([results[place] for place in places])
        for place, copied in zip(places, made, strict=True):
            results[place] = copied

    return copy_each


def copies_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of tensors that fill their memory without gaps: the same values, sizes and strides in memory of their own."""
    if len(tensors) < MANY_COPIES:
        return [tensor.clone() for tensor in tensors]
    made = [torch.empty_like(tensor) for tensor in tensors]
    torch_internals.foreach_copy_(made, tensors)
    return made
