"""Tell which memory a recording writes, and whether inputs of a call lie in it.

Inputs are read from copies made before the graph runs. An input that lies in memory the graph writes would be read as
it was before that, where the step itself reads what it has written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from optimizations.capture.step.observer import StepRefused, storage
from optimizations.graph.memory import MemoryRanges, memory_of, overlaps, size_bytes
from optimizations.report.steps import Refusal


class Writes:
    """Tell which tensors a captured call writes. Made before the call, of the `tensors` to check.

    PyTorch counts versions, but not of tensors that were made in inference mode, nor of writes through `.data` and into
    the running statistics of batch normalisation. Of these the operators tell (`note` is for `Observer.before_write`).
    Compiled code tells nothing: where there is some, each tensor made in inference mode is taken to be written, but
    those whose elements overlap, which nothing can write.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, compiled: bool) -> None:
        self._versions = {id(tensor): tensor._version for tensor in tensors if not tensor.is_inference()}
        self._compiled = compiled
        self._storages: set[int] = set()

    def note(self, tensor: torch.Tensor) -> None:
        self._storages.add(storage(tensor))

    def include(self, tensor: torch.Tensor) -> bool:
        """Return whether the call, which is over, wrote this one's memory."""
        if self.counted(tensor) or (storage(tensor) and storage(tensor) in self._storages):
            return True
        return tensor.is_inference() and self._compiled and _has_memory(tensor) and not overlaps(tensor)

    def counted(self, tensor: torch.Tensor) -> bool:
        """Return whether this one's version says, once the call is over, that it was written."""
        if tensor.is_inference():
            return False
        return bool(tensor._version != self._versions.get(id(tensor), tensor._version))


class WrittenMemory:
    """Hold the memory of `tensors` as it is when this is made: what is written, or read next to written inputs."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._ranges = MemoryRanges(memory_of(tensor) for tensor in tensors if _has_memory(tensor))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether this one lies in it, wholly or in part."""
        return _has_memory(tensor) and self._ranges.overlap(tensor.data_ptr(), size_bytes(tensor))

    def holds_one_of(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Return whether one of these lies in it, wholly or in part."""
        return bool(self._ranges.borders) and any(map(self.holds, inputs))


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and size_bytes(tensor) > 0


def shared_with_written(tensors: Sequence[torch.Tensor], written: Sequence[int]) -> tuple[int, int] | None:
    """Return an input that is written and another in the same memory, wholly or in part, by index; None if none are."""
    places = list(map(storage, tensors))
    for index in written:
        for other, place in enumerate(places):
            if not place or place != places[index] or tensors[other] is tensors[index]:
                continue
            # Caches are often parts of one tensor, side by side.
            if memory_of(tensors[other]).overlaps(memory_of(tensors[index])):
                return index, other
    return None


def refuse_shared(
    tensors: Sequence[torch.Tensor],
    labels: Sequence[str],
    written: Sequence[int],
    mutated: Sequence[torch.Tensor],
    written_back: Sequence[int],
    read: WrittenMemory,
) -> None:
    """Refuse writes to memory that two inputs share: inputs, by their `labels`, are read from copies of their own.

    `written` are inputs that are written, `mutated` other tensors. `written_back` are those of `written` that have a
    copy, `read` is what is read where it lies.

    Raises:
        StepRefused: something does.
    """
    found = [(labels[one], labels[other]) for one, other in filter(None, [shared_with_written(tensors, written)])]
    found += [(labels[one], "a tensor that it reads") for one in written_back if read.holds(tensors[one])]
    elsewhere = WrittenMemory(mutated)
    found += [("a tensor", label) for one, label in zip(tensors, labels, strict=True) if elsewhere.holds(one)]
    for one, other in found:
        reason = f"writes into {one}, which shares memory with {other}"
        raise StepRefused(Refusal(reason, "pass a copy (`clone()`) of the argument"))
