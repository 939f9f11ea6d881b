"""Record what a call changes of tensors: their metadata and address, by Python, and their memory, by operators.

Metadata are class, shape, strides, dtype, device, `requires_grad`, and the conjugate, negative and inference bits.

Changes of these go through no operator, so a graph would not repeat them. A step that makes one is refused, and a
failed capture restores them.

A write into the copy of an input does not reach the caller. If an input shares memory that the graph writes, its copy
has the values from before these writes, but the step itself would read the values from after them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch

from optimizations.capture.signature import tensor_key
from optimizations.capture.step.observer import storage
from optimizations.graph.memory import overlaps
from optimizations.torch_internals.geometry import same_metadata

TensorMetadata = tuple[object, ...]


def metadata_of(tensor: torch.Tensor) -> TensorMetadata:
    """Return the metadata for which the kernels of a graph were chosen; not the address."""
    return tensor.requires_grad, tensor_key(tensor), tensor.is_inference()


class Metadata:
    """Store the metadata of distinct tensors without references to them."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._before = list(map(metadata_of, tensors))
        self._same = same_metadata(tensors)

    def same(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Return whether these tensors, in the same order, have that metadata."""
        # The check in C++ also compares settings such as autocast.
        return self._same(tensors) or list(map(metadata_of, tensors)) == self._before


class TensorMarks:
    """Record metadata and addresses of named tensors. With `to_restore` they can be restored."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, to_restore: bool = False) -> None:
        self._before = [
            (path, tensor, _marks_of(tensor), _detached(tensor) if to_restore else None)
            for path, tensor in tensors.items()
        ]

    def changed(self) -> Iterator[str]:
        """Yield names of tensors whose metadata or address changed."""
        return (path for path, tensor, before, _ in self._before if _marks_of(tensor) != before)

    def restore(self) -> None:
        """Restore the recorded memory and `requires_grad` of changed tensors."""
        for _, tensor, before, kept in self._before:
            if _marks_of(tensor) == before:
                continue
            with contextlib.suppress(RuntimeError):  # a tensor that refuses the change was not changed by the step
                if kept is not None:
                    tensor.data = kept
                if tensor.is_leaf:
                    tensor.requires_grad_(bool(before[1][0]))


def _detached(tensor: torch.Tensor) -> torch.Tensor | None:
    with contextlib.suppress(RuntimeError, ValueError):
        return tensor.detach()
    return None


def _marks_of(tensor: torch.Tensor) -> tuple[int, TensorMetadata]:
    try:
        address = tensor.data_ptr()
    except (RuntimeError, ValueError):  # a tensor without memory of its own
        address = 0
    return address, metadata_of(tensor)


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
        return tensor.is_inference() and self._compiled and storage(tensor) > 0 and not overlaps(tensor)

    def counted(self, tensor: torch.Tensor) -> bool:
        """Return, after the call, whether the version of a tensor changed."""
        if tensor.is_inference():
            return False
        return bool(tensor._version != self._versions.get(id(tensor), tensor._version))


def storages(tensors: Iterable[torch.Tensor | None]) -> set[int]:
    """Return the addresses of the storages of tensors that have memory."""
    return {storage(tensor) for tensor in tensors if tensor is not None} - {0}
