"""Find outputs of a graph that are inputs, share the memory of inputs, or are repeated.

Note [Parameters that are returned]. A forward returns the parameters that its backward reads. Their addresses equal
those of the recording, so stock returns the tensor objects of the recording, and keeps them alive. But the program may
have replaced the object over the same memory (`Parameter(old.data)`). Autograd detects a write before the backward by
the version of the saved object, and the old object may have been given other memory: the gradient would be silently
wrong. So each replay returns the tensors of its own call, and none of the recording's is kept alive.

Note [Results that a backward reads]. The same holds for a result that a backward reads, of this graph (`x.exp()`) or of
an earlier one. If the program writes it before the backward, eager raises. The function returns one object at two
positions, or the input itself. Stock makes a separate tensor for each, with its own version counter, and the backward
reads the overwritten values. So replays return one object too, and the call's own input.

Note [Inputs that are returned]. A generated function may return an input unchanged, for a later partition of the same
program to read or write. The graph's own output is then the placeholder and not the caller's tensor. With several
partitions the caller's tensor is returned instead, as the function does without a graph. With one partition nothing
writes the tensor later, and a backward finds its saved tensor in the pool. If the function wrote a result into an
input's memory (Inductor reuses memory of dead inputs), the graph's own output is right: the caller's tensor was not
written.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations.torch_internals.geometry import picker


@dataclass(frozen=True)
class InPlace:
    """Describe an output in an input's memory: their positions, whether they are one tensor, the offset in bytes."""

    output: int
    input: int
    is_input: bool
    offset_bytes: int = 0


class ReturnedInPlace:
    """Hold outputs of one recording that share memory with inputs, by position."""

    def __init__(self, found: Sequence[InPlace] = ()) -> None:
        self.found = tuple(found)
        self._views = [one for one in self.found if not one.is_input]
        self._same: list[tuple[slice, Callable[[Any], tuple[Any, ...]]]] = []
        # The tensors saved for a backward begin with inputs, so most are adjacent, and one slice assignment moves them.
        same = (one for one in self.found if one.is_input)
        for _, neighbours in itertools.groupby(enumerate(same), lambda pair: pair[1].output - pair[0]):
            run = [one for _, one in neighbours]
            places = slice(run[0].output, run[-1].output + 1)
            self._same.append((places, picker([one.input for one in run])))

    def return_results(self, outputs: list[Any], inputs: Sequence[Any] | Mapping[int, Any]) -> None:
        """Replace recorded tensors by the call's own. Note [Parameters that are returned]."""
        for places, chosen in self._same:
            outputs[places] = chosen(inputs)
        for one in self._views:
            outputs[one.output] = _in_the_memory_of(inputs[one.input], outputs[one.output], one.offset_bytes)


def found_in(
    outputs: Sequence[torch.Tensor | None], fixed: Mapping[int, torch.Tensor], passed_on: Mapping[int, int]
) -> ReturnedInPlace:
    """Return the outputs that are inputs, or share their memory.

    Args:
        outputs: those recorded at fixed addresses, None at other positions.
        fixed: inputs at fixed addresses, as they were recorded, by index.
        passed_on: by position, the index of an input that is a result of an earlier graph and an output of this one.
    """
    same = {id(value): index for index, value in fixed.items()}

    @functools.cache
    def starts_in_storages() -> Mapping[int, Mapping[int, int]]:
        near: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for index, value in fixed.items():
            near[value.untyped_storage()._cdata][index] = _offset_bytes(value)
        return near

    found = [InPlace(place, index, is_input=True) for place, index in passed_on.items()]
    for place, output in enumerate(outputs):
        if output is None:
            continue
        if id(output) in same:
            found.append(InPlace(place, same[id(output)], is_input=True))
        elif (storage := output.untyped_storage()).data_ptr() and (starts := starts_in_storages().get(storage._cdata)):
            start = _offset_bytes(output)
            # Of the inputs in its storage, the last that begins before it contains it.
            owner = max(starts, key=lambda index: (starts[index] <= start, starts[index]))
            found.append(InPlace(place, owner, is_input=False, offset_bytes=start - starts[owner]))
    return ReturnedInPlace(sorted(found, key=lambda one: one.output))


def in_placeholder(place: int, output: torch.Tensor, index: int, placeholder: torch.Tensor) -> InPlace:
    """Describe an output in a copied input's memory: the input if the geometry is the same, otherwise a view of it."""
    geometry = output.dtype, output.shape, output.stride(), output.storage_offset()
    is_input = geometry == (placeholder.dtype, placeholder.shape, placeholder.stride(), 0)
    return InPlace(place, index, is_input, _offset_bytes(output))


def repeated(outputs: Sequence[Any]) -> list[tuple[int, int]]:
    """Return positions of repeated tensors, each with the first one. Note [Results that a backward reads]."""
    first: dict[int, int] = {}
    return [
        (place, earlier)
        for place, output in enumerate(outputs)
        if isinstance(output, torch.Tensor) and (earlier := first.setdefault(id(output), place)) != place
    ]


def _offset_bytes(tensor: torch.Tensor) -> int:
    """Return the offset in its storage, in bytes. The address of a tensor without elements does not give it."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _in_the_memory_of(caller: torch.Tensor, output: torch.Tensor, offset_bytes: int) -> torch.Tensor:
    """Return an output that shares an input's memory, as a view of the caller's storage."""
    start = _offset_bytes(caller) + offset_bytes
    return over(caller.untyped_storage(), output, start // output.element_size())


def over(storage: torch.UntypedStorage, like: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a tensor with the shape, strides and dtype of `like` at element `offset` of another storage."""
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, offset, like.shape, like.stride())
