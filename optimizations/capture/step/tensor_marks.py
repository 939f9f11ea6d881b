"""Compare the metadata and address of a tensor, which Python may change, and not its values.

Metadata are class, shape, strides, dtype, device, `requires_grad`, and the conjugate, negative and inference bits.

These changes go through no operator, so a graph would not repeat them. A step that makes one is refused, and a failed
capture restores them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from optimizations.capture.signature import tensor_key
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
        if not self._same(tensors):
            if list(map(metadata_of, tensors)) != self._before:
                return False
            self._same = same_metadata(tensors)  # its check also compares settings such as autocast
        return True


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
