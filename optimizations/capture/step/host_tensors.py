"""Compare tensors in CPU memory that a step reaches: no graph repeats what is computed of them, or what Python reads.

Reads by `tolist`, `numpy` and the like pass no operator, so every such tensor may be read. Their bytes are compared
before each launch, up to a limit in sum; of larger ones the address and the version that PyTorch counts. A tensor that
differed between two observed calls, which were alike all the same and did nothing with it, is not compared.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from optimizations.graph.memory import size_bytes

MOST_BYTES = 2**20
"""Compared by their bytes, in sum."""


def on_the_host(tensors: Mapping[str, torch.Tensor], holds: Callable[[torch.Tensor], bool]) -> dict[str, torch.Tensor]:
    """Return those of plain CPU memory, by path. `holds`: whether a tensor lies on the GPU."""
    return {
        path: tensor
        for path, tensor in tensors.items()
        if tensor.device.type == "cpu"
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested  # no operator on such is recorded
        and size_bytes(tensor)
        and not holds(tensor)
    }


class HostTensors:
    """Hold these tensors, as they are when this is made."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._compared: dict[str, torch.Tensor] = {}
        self._counted: dict[str, torch.Tensor] = {}
        left = MOST_BYTES
        for path, tensor in sorted(tensors.items(), key=lambda item: size_bytes(item[1])):
            left -= size_bytes(tensor)
            (self._compared if left >= 0 else self._counted)[path] = tensor
        self._then = self._now()

    def _now(self) -> list[Any]:
        found: list[Any] = [
            ctypes.string_at(tensor.data_ptr(), size_bytes(tensor)) for tensor in self._compared.values()
        ]
        found += [
            (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in self._counted.values()
        ]
        return found

    def __bool__(self) -> bool:
        return bool(self._compared or self._counted)

    def unchanged(self) -> bool:
        """Return whether they are as they were."""
        return self._now() == self._then

    def differences(self) -> list[tuple[str, Any]]:
        """Return those that are not as they were, with their content."""
        paths = [*self._compared, *self._counted]
        return [(path, new) for path, new, old in zip(paths, self._now(), self._then, strict=True) if new != old]

    def alike(self, tensors: Iterable[str], *, but: Collection[str] = ()) -> set[str]:
        """Return, of these paths, those whose tensors are as they were, and those in `but`."""
        changed = {path for path, _ in self.differences()}
        known = {*self._compared, *self._counted}
        return {path for path in tensors if path in but or (path in known and path not in changed)}
