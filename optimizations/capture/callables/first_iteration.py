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
    """Represent a forward whose backward may still run: the hooks that record the backward reference this."""

    def __init__(self, event: Event) -> None:
        self.event, self.ran_backward = event, False


class FirstIteration:
    """Run callables eagerly, and record their order and one sample for each signature of arguments.

    Attributes:
        samples: copies of arguments for each callable; the index of a sample is the `variant` of its events.
        is_over: whether the iteration has ended.
    """

    def __init__(self, callables: int) -> None:
        self.samples: list[list[Sample]] = [[] for _ in range(callables)]
        self.is_over = False
        self._keys: list[list[Hashable]] = [[] for _ in range(callables)]
        self._order: list[Event] = []
        self._running: list[weakref.ref[_Forward]] = []
        noted = weakref.ref(self)

        def after_step(*arguments: Any) -> None:
            if (one := noted()) is not None and one._order and not one._is_awaited():
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
        variant = self._variant(number, signature((args, kwargs), given), (args, kwargs), given)
        forward = _Forward(Event(number, "forward", variant, len(self._order)))
        self._order.append(forward.event)
        returned = function(*args, **kwargs)
        results: list[torch.Tensor] = []
        flatten(returned, results)
        note = self._noting(forward)
        for one in results:
            if one.grad_fn is not None and not any(one is tensor for tensor in given):
                one.register_hook(note)
        self._running.append(weakref.ref(forward))
        del forward, note
        if len(self._order) >= MOST_EVENTS and not self._is_awaited():
            self.end()
        return returned

    def events(self) -> tuple[Event, ...]:
        """Return the recorded events."""
        return tuple(self._order)

    def _variant(self, number: int, key: Hashable, sample: Sample, tensors: list[torch.Tensor]) -> int:
        """Return the index of the sample with the signature of a call. If there is none, copy the arguments."""
        keys = self._keys[number - 1]
        if key not in keys:
            copies = {id(one): one.detach().clone().requires_grad_(one.requires_grad) for one in tensors}
            self.samples[number - 1].append(replaced(sample, iter([copies[id(one)] for one in tensors])))
            keys.append(key)
        return keys.index(key)

    def _is_awaited(self) -> bool:
        """Return whether the backward of a forward may still run."""
        self._running = [one for one in self._running if (forward := one()) and not forward.ran_backward]
        return bool(self._running)

    def _noting(self, forward: _Forward) -> Callable[[torch.Tensor], None]:
        noted = weakref.ref(self)

        def note(gradient: torch.Tensor) -> None:
            one = noted()
            if one is not None and not (one.is_over or forward.ran_backward):
                one._order.append(replace(forward.event, direction="backward"))
            forward.ran_backward = True

        return note
