"""Hooks of parameters, and those of all modules and optimizers, as they were when a step was recorded.

PyTorch numbers registrations, so a launch compares the latest number. A removal does not change it, so the sizes of the
dicts that held hooks are compared too. If the number differs, all dicts are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from optimizations.torch_internals import hook_registry


class Hooks:
    """Made when a step is recorded. `tensors` are those whose gradients it computes."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._then = self._now()
        self._take_in()

    def _dicts(self) -> list[dict[int, Any]]:
        return [*hook_registry.global_hooks(), *[held for t in self._tensors for held in hook_registry.tensor_hooks(t)]]

    def _now(self) -> list[Callable[..., Any]]:
        return [hook for held in self._dicts() for hook in held.values()]

    def _take_in(self) -> None:
        self._registered = hook_registry.registered()
        self._filled = [held for held in self._dicts() if held]
        self._sizes = list(map(len, self._filled))

    def unchanged(self) -> bool:
        """Whether the very same hooks run."""
        if self._registered == hook_registry.registered() and (
            not self._filled or list(map(len, self._filled)) == self._sizes
        ):
            return True
        if not _same(self._now(), self._then):
            return False
        self._take_in()
        return True

    @property
    def registered(self) -> int | None:
        """The latest number as long as which hooks are as they were; None where some could be removed."""
        return None if self._filled else self._registered

    def key(self) -> tuple[int, ...]:
        """The hooks there are now, by identity; () where they are those of the recording."""
        now = self._now()
        return () if _same(now, self._then) else tuple(map(id, now))


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))
