"""Compare the hooks of parameters, modules and optimizers with those that ran when a step was recorded.

PyTorch numbers registrations, so the latest number is compared first. A removal does not change it, so the sizes of the
dicts that held hooks are compared too. Only where the number differs are all dicts read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from optimizations.capture.step.host_state import MODULE_HOOKS
from optimizations.torch_internals import hook_registry


def hooks_of(tensors: Iterable[torch.Tensor], attributes: Iterable[dict[str, Any]]) -> list[dict[int, Any]]:
    """Return the dicts that hold hooks: global ones, those of these tensors, and those of modules, by their `vars`."""
    of_tensors = [held for tensor in tensors for held in hook_registry.tensor_hooks(tensor)]
    of_modules = [held for own in attributes for name in MODULE_HOOKS if (held := own.get(name)) is not None]
    return [*hook_registry.global_hooks(), *of_tensors, *of_modules]


class Hooks:
    """Hold the hooks that run now. `tensors` are those whose gradients a step computes. It does not hold the modules:
    one that was an argument may go."""

    def __init__(self, tensors: Iterable[torch.Tensor], modules: Iterable[torch.nn.Module] = ()) -> None:
        self._tensors, self._attributes = list(tensors), [vars(module) for module in modules]
        self._then = self._now()
        self._take_in()

    def _now(self) -> list[Callable[..., Any]]:
        return [hook for held in hooks_of(self._tensors, self._attributes) for hook in held.values()]

    def _take_in(self) -> None:
        self._registered = hook_registry.registered()
        self._filled = [held for held in hooks_of(self._tensors, self._attributes) if held]
        self._sizes = list(map(len, self._filled))

    def unchanged(self) -> bool:
        """Return whether the very same hooks run."""
        if self._registered == hook_registry.registered() and (
            not self._filled or list(map(len, self._filled)) == self._sizes
        ):
            return True
        now = self._now()
        if len(now) != len(self._then) or any(one is not other for one, other in zip(now, self._then, strict=True)):
            return False
        self._take_in()
        return True
