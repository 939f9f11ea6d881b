"""Check quickly that the arguments of a call look like those that were recorded.

A signature is a value that can be looked up, with the metadata of each tensor and each setting. After a recording it
is known what they are. So the structure of the arguments is compared, tensors in bulk, and the settings around the step
as they are. Whatever differs takes the slow path and is compared by its signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from optimizations.capture.signature import alias_pattern, flatten
from optimizations.capture.step.surroundings import ambient
from optimizations.torch_internals.tensor_guard import same_metadata


class Arguments:
    """Hold what the arguments of a recording look like, and the settings around it. `tensors` are all of theirs."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self._structure = flatten((args, kwargs), [])
        self._only_tensors = not kwargs and all(isinstance(one, torch.Tensor) for one in args)
        only = args[0] if len(args) == 1 and not kwargs and type(args[0]) is dict else {}
        self._keys = list(only) if only and all(isinstance(one, torch.Tensor) for one in only.values()) else None
        self._aliases = alias_pattern(tensors)
        self.distinct = len(set(self._aliases)) == len(tensors)
        self.renew(tensors)

    def renew(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take in the settings as they are now: grad mode, autocast, default dtype and others.

        `tensors` are of a call with the same signature: what C++ compares includes settings, such as autocast.
        """
        self._looks, self._settings = same_metadata(tensors), ambient()

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """Return what stands where tensors stood; None if the structure is another."""
        if self._only_tensors and not kwargs:
            return [*args]
        if self._keys is not None and len(args) == 1 and not kwargs and type(args[0]) is dict:
            return [*args[0].values()] if list(args[0]) == self._keys else None
        found: list[torch.Tensor] = []
        return found if flatten((args, kwargs), found) == self._structure else None

    def tensors_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """Return the tensors of a call that has the signature of the recording; None if it may have another."""
        found = self._taken(args, kwargs)
        if found is None or not self._looks(tuple(found)):
            return None
        if len(set(map(id, found))) < len(found) if self.distinct else alias_pattern(found) != self._aliases:
            return None
        return found if ambient() == self._settings else None
