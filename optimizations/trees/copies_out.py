"""Copy results that a program keeps; the copies are laid out once for each recording. Note [Kept results] in `manager`.

A call that copies is a call of a program that holds each result until it has the next, such as a loop that decodes
token by token and names its result. Where such a loop waits for nothing, the CPU time after the launch counts as much
as that before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.trees.returned import over

MANY_COPIES = 4
"""As many results are copied by one call, with a kernel for many at a time, instead of one by one."""


@dataclass(frozen=True, slots=True)
class CopiesOut:
    """Hold how the results of one recording that the program keeps are copied.

    Attributes:
        kept: how many results the program keeps.
        count, bytes: how many copies are made, and of how many bytes.
        make: puts copies in their places in a list of results: in all of them, or in none where it raises.
    """

    kept: int
    count: int
    bytes: int
    make: Callable[[list[Any]], None]


def copies_out(results: Sequence[Any], kept: Collection[int], pool: Collection[int]) -> CopiesOut:
    """Lay out copies of the results at the places `kept` whose storages begin at one of the addresses `pool`.

    Results that share memory share a copy, and those that are one tensor stay one.
    """
    places_at: defaultdict[int, list[int]] = defaultdict(list)
    for place, result in enumerate(results):
        if isinstance(result, torch.Tensor) and (address := result.untyped_storage().data_ptr()) in pool:
            places_at[address].append(place)
    alone: list[int] = []
    shared: list[list[int]] = []
    size_bytes = 0
    for places in places_at.values():
        first = results[places[0]]
        if not any(place in kept for place in places):
            continue
        if len(places) == 1 and _is_dense(first):
            alone.append(places[0])
            size_bytes += first.nbytes
        else:
            shared.append(places)
            size_bytes += first.untyped_storage().nbytes()

    def make(results: list[Any]) -> None:
        made: dict[int, torch.Tensor] = {}
        for places in shared:
            storage = results[places[0]].untyped_storage().clone()
            for place in places:
                result = results[place]
                if id(result) not in made:
                    made[id(result)] = over(storage, result, int(result.storage_offset()))
        copied = copies_of([results[place] for place in alone])
        for places in shared:
            for place in places:
                results[place] = made[id(results[place])]
        for place, one in zip(alone, copied, strict=True):
            results[place] = one

    return CopiesOut(len(kept), len(alone) + len(shared), size_bytes, make)


def copies_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies with the same values, sizes and strides of tensors that fill their memory without gaps."""
    if len(tensors) < MANY_COPIES:
        return [tensor.clone() for tensor in tensors]
    made = [torch.empty_like(tensor) for tensor in tensors]
    torch_internals.foreach_copy_(made, tensors)
    return made


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor fills its memory once, in whatever order of dimensions: a plain clone is a full copy."""
    expected = 1
    for extent, step in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda one: one[1]):
        if extent != 1 and step != expected:
            return False
        expected *= extent
    return True
