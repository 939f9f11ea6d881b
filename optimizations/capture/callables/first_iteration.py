"""Record the order in which a program runs its callables in the first iteration, in which they run eagerly.

A forward is recorded when it is called. Its backward is recorded when autograd has the first gradient of one of its
results. The iteration ends when a PyTorch optimizer has made its step and no backward is pending, or when the program
ends it. Several iterations, such as those of a scaler that skips its first steps, need the same graphs as one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from optimizations.capture.callables.arguments import Sample
from optimizations.capture.callables.order import Event
from optimizations.capture.signature import flatten, replaced, signature

MOST_EVENTS = 4096
"""Most recorded forwards and backwards. A program with more probably has no PyTorch optimizer."""


class _Forward:
    """Represent a forward whose backward may still run. It is the hook that records the backward, and lives as long."""

    def __init__(self, event: Event, first: FirstIteration) -> None:
        self._event, self._first, self.ran_backward = event, weakref.ref(first), False

    def __call__(self, gradient: torch.Tensor) -> None:
        if (first := self._first()) is not None and not (first.is_over or self.ran_backward):
            first.order.append(replace(self._event, direction="backward"))
        self.ran_backward = True


class FirstIteration:
    """Run callables eagerly, and record their order and one sample for each signature of arguments.

    Attributes:
        samples: copies of arguments for each callable, by signature. The place of a sample is the `variant` of its
            events.
        order: the recorded forwards and backwards.
        is_over: whether the iteration has ended.
    """

    def __init__(self, callables: int) -> None:
        self.samples: list[dict[Hashable, Sample]] = [{} for _ in range(callables)]
        self.order: list[Event] = []
        self.is_over = False
        self._running: list[weakref.ref[_Forward]] = []
        noted = weakref.ref(self)

        def after_step(*arguments: Any) -> None:
            if (one := noted()) is not None and one.order and not one._is_awaited():
                one.end()

        self._hook = register_optimizer_step_post_hook(after_step)
        weakref.finalize(self, self._hook.remove).atexit = False

    def end(self) -> None:
        """End the iteration."""
        self.is_over = True
        self._hook.remove()

    def call(self, number: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a callable for a call of the program, and record it."""
        given: list[torch.Tensor] = []
        key, samples = signature((args, kwargs), given), self.samples[number - 1]
        if key not in samples:
            copies = {id(one): one.detach().clone().requires_grad_(one.requires_grad) for one in given}
            samples[key] = replaced((args, kwargs), iter([copies[id(one)] for one in given]))
        event = Event(number, "forward", list(samples).index(key), len(self.order))
        self.order.append(event)
        returned = function(*args, **kwargs)
        results: list[torch.Tensor] = []
        flatten(returned, results)
        forward = _Forward(event, self)
        for one in results:
            if one.grad_fn is not None and not any(one is tensor for tensor in given):
                one.register_hook(forward)
        self._running.append(weakref.ref(forward))
        del forward
        if len(self.order) >= MOST_EVENTS and not self._is_awaited():
            self.end()
        return returned

    def _is_awaited(self) -> bool:
        """Return whether the backward of a forward may still run."""
        self._running = [one for one in self._running if (forward := one()) and not forward.ran_backward]
        return bool(self._running)
