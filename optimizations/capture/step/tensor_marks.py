"""Compare what Python may change of a tensor itself, and not what it holds.

That is class, shape, strides, dtype, `requires_grad`, whether it stands for the conjugates or negatives of what lies in
its memory, and which memory that is.

These changes go through no operator, so a graph would not repeat them. A step that makes one is refused, and a capture
that fails puts them back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch

from optimizations.torch_internals.tensor_guard import same_metadata

Look = tuple[object, ...]


def look(tensor: torch.Tensor) -> Look:
    """Return everything but the memory: what kernels of a graph were chosen for."""
    try:
        strides = tensor.stride() if tensor.layout is torch.strided else None
        seen_as = tensor.device, tensor.is_inference(), tensor.is_conj(), tensor.is_neg()
        return tensor.requires_grad, type(tensor), tensor.dtype, tensor.shape, *seen_as, strides
    except RuntimeError:  # a parameter that gets its shape from the first batch
        return tensor.requires_grad, type(tensor), tensor.dtype, None, None


def looks(tensors: Iterable[torch.Tensor]) -> list[Look]:
    """Return `look` of each."""
    return list(map(look, tensors))


class Metadata:
    """Keep the metadata of tensors, and not the tensors."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._then = looks(tensors)
        self._same = same_metadata(tensors)

    def same(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Return whether these tensors, in the same order, have that metadata."""
        if not self._same(tensors):
            if looks(tensors) != self._then:
                return False
            self._same = same_metadata(tensors)  # which compares settings too, such as autocast
        return True


class TensorMarks:
    """Keep tensors by name, as they are when this is made. With `to_restore` they can be made so again."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, to_restore: bool = False) -> None:
        self._then = [(path, tensor, look(tensor), _address(tensor)) for path, tensor in tensors.items()]
        self._kept = [_detached(tensor) for tensor in tensors.values()] if to_restore else []

    def changed(self) -> Iterator[str]:
        """Yield names of those that are not as they were."""
        return (path for path, tensor, then, address in self._then if not _is(tensor, then, address))

    def restore(self) -> None:
        """Make the tensors what they were."""
        for (_, tensor, then, address), kept in zip(self._then, self._kept, strict=True):
            if _is(tensor, then, address):
                continue
            with contextlib.suppress(RuntimeError):  # what does not let itself be changed was not
                if kept is not None:
                    tensor.data = kept
                if tensor.is_leaf:
                    tensor.requires_grad_(bool(then[0]))


def _detached(tensor: torch.Tensor) -> torch.Tensor | None:
    with contextlib.suppress(RuntimeError, ValueError):
        return tensor.detach()
    return None


def _is(tensor: torch.Tensor, then: Look, address: int) -> bool:
    return look(tensor) == then and _address(tensor) == address


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, ValueError):  # a tensor without memory of its own
        return 0
