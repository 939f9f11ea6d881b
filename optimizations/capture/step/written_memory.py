"""Find the memory that a recording writes, and inputs of a call that overlap it.

Inputs are copied before the graph runs. A write into a copy does not reach the caller. If an input overlaps memory that
the graph writes, the copy has the values from before these writes, but the step itself would read the values from after
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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
    """Store the current memory ranges of tensors that are written."""

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


def refuse_writes(
    tensors: Sequence[torch.Tensor],
    labels: Sequence[str],
    placeholders: Sequence[torch.Tensor],
    is_written: Callable[[torch.Tensor], bool],
    elsewhere: WrittenMemory,
) -> None:
    """Refuse writes into inputs that are copied, and into memory that such an input shares.

    Args:
        labels: names of the inputs.
        placeholders: their copies.
        is_written: whether the captured call wrote a tensor.
        elsewhere: memory that it wrote other than in a copy.

    Raises:
        StepRefused: there is such a write.
    """
    for tensor, label, placeholder in zip(tensors, labels, placeholders, strict=True):
        if is_written(placeholder):
            may = "may write" if placeholder.is_inference() else "writes"
            raise StepRefused(
                Refusal(
                    f"{may} into {label}, of which a graph has a copy",
                    "write into a copy (`clone()`), or keep what is written in an attribute or a buffer",
                )
            )
        if elsewhere.holds(tensor):
            reason = f"writes into a tensor, which shares memory with {label}"
            raise StepRefused(Refusal(reason, "pass a copy (`clone()`) of the argument"))
