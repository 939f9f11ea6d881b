"""Find the memory that a recording writes, and inputs of a call that overlap it.

Inputs are copied before the graph runs. If an input overlaps memory that the graph writes, the copy has the values from
before these writes, but the step itself would read the values from after them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from optimizations.capture.step.observer import StepRefused, storage
from optimizations.graph.memory import MemoryRanges, memory_of, overlaps, size_bytes
from optimizations.report.steps import Refusal


class Writes:
    """Find the tensors that a captured call writes. Create it before the call with the `tensors` to check.

    PyTorch counts versions, but not for inference tensors, for writes through `.data`, or for the running statistics of
    batch normalisation. These writes are found by the observed operators (`note` is for `Observer.before_write`).
    Compiled code is not observed. If there is some, every inference tensor counts as written, except those whose
    elements overlap, which cannot be written.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, compiled: bool) -> None:
        self._versions = {id(tensor): tensor._version for tensor in tensors if not tensor.is_inference()}
        self._compiled = compiled
        self._storages: set[int] = set()

    def note(self, tensor: torch.Tensor) -> None:
        self._storages.add(storage(tensor))

    def include(self, tensor: torch.Tensor) -> bool:
        """Return, after the call, whether it wrote the memory of a tensor."""
        if self.counted(tensor) or (storage(tensor) and storage(tensor) in self._storages):
            return True
        return tensor.is_inference() and self._compiled and _has_memory(tensor) and not overlaps(tensor)

    def counted(self, tensor: torch.Tensor) -> bool:
        """Return, after the call, whether the version of a tensor changed."""
        if tensor.is_inference():
            return False
        return bool(tensor._version != self._versions.get(id(tensor), tensor._version))


class WrittenMemory:
    """Store the current memory ranges of tensors that are written, or read in addition to written inputs."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._ranges = MemoryRanges(memory_of(tensor) for tensor in tensors if _has_memory(tensor))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor overlaps this memory."""
        return _has_memory(tensor) and self._ranges.overlap(tensor.data_ptr(), size_bytes(tensor))

    def holds_one_of(self, inputs: Sequence[torch.Tensor], sizes: Sequence[int] | None = None) -> bool:
        """Return whether one of these tensors overlaps this memory. `sizes`: theirs in bytes, if known."""
        if sizes is None or not self._ranges.borders:
            return bool(self._ranges.borders) and any(map(self.holds, inputs))
        return any(map(self._ranges.overlap, map(torch.Tensor.data_ptr, inputs), sizes))


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and size_bytes(tensor) > 0


def shared_with_written(tensors: Sequence[torch.Tensor], written: Sequence[int]) -> tuple[int, int] | None:
    """Return the indices of a written input and of a different input that overlaps it; None if there are none."""
    places = list(map(storage, tensors))
    for index in written:
        for other, place in enumerate(places):
            if not place or place != places[index] or tensors[other] is tensors[index]:
                continue
            # Caches are often adjacent parts of one tensor.
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
    """Refuse writes to memory that two inputs share: each input is read from its own copy.

    Args:
        labels: names of the inputs.
        written: indices of written inputs; `written_back`: those of them that are copied.
        mutated: other tensors that are written.
        read: memory that is read in place.

    Raises:
        StepRefused: a write goes to shared memory.
    """
    found = [(labels[one], labels[other]) for one, other in filter(None, [shared_with_written(tensors, written)])]
    found += [(labels[one], "a tensor that it reads") for one in written_back if read.holds(tensors[one])]
    elsewhere = WrittenMemory(mutated)
    found += [("a tensor", label) for one, label in zip(tensors, labels, strict=True) if elsewhere.holds(one)]
    for one, other in found:
        reason = f"writes into {one}, which shares memory with {other}"
        raise StepRefused(Refusal(reason, "pass a copy (`clone()`) of the argument"))
