"""Count the forwards of callables that are live at one time: a callable needs as many pairs of graphs.

The tensors that a forward saves are live until its backward. The order decides nothing else: each launch is preceded by
a check that no tensor in the memory of its graphs is needed any more.

The caller gives the order as numbers: `[1, 1, 2, 2, -2, -2, -1, -1]` are two forwards of callable 1, two of callable 2,
then their backwards. The n-th -c is the backward of the n-th c, as in the schedules of Megatron and Transformer Engine.
Or the first iteration shows it, in which the callables run eagerly. That ends when a PyTorch optimizer has made its
step and no backward may still run, or when the program ends it. Several iterations, such as those of a scaler that
skips its first steps, need the same graphs as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from optimizations.capture.callables.arguments import Plan, Sample
from optimizations.capture.callables.capturing import inputs_like
from optimizations.capture.callables.installed import Installed
from optimizations.capture.callables.slot import Forward
from optimizations.capture.inputs import is_plain
from optimizations.capture.signature import parts, replaced, signature
from optimizations.report.steps import WrongOrder
from optimizations.torch_internals.geometry import is_lazy_view
from optimizations.weak_registry import WeakRegistry


def live_at_once(order: Iterable[int], callables: int) -> list[int]:
    """Return how many forwards of each callable are live at one time. Every forward has its backward.

    Raises:
        TypeError: it is no list.
        WrongOrder: it has an unknown callable, a backward before its forward, or a forward without backward.
    """
    if not isinstance(order, Iterable):
        raise TypeError(f"order={order!r} has to be a list of whole numbers, such as [1, 1, 2, -2, -1, 2, -2, -1]")
    counts: Counter[int] = Counter()
    most = [1] * callables
    for place, entry in enumerate(order):
        if type(entry) is not int:
            raise WrongOrder(
                f"order[{place}] is {entry!r}: entries are whole numbers, c for a forward of callable c and -c for its "
                "backward, which computes all gradients at once"
            )
        number = abs(entry)
        if not 1 <= number <= callables:
            raise WrongOrder(f"order[{place}] is {entry}, but callables go from 1 to {callables}")
        counts[entry] += 1
        if (live := counts[number] - counts[-number]) < 0:
            raise WrongOrder(f"order[{place}] is {entry}, but no forward of callable {number} is without backward")
        most[number - 1] = max(most[number - 1], live)
    for number in range(1, callables + 1):
        if not counts[number] == counts[-number] > 0:
            found = f"{counts[number]} forwards and {counts[-number]} backwards of callable {number}"
            raise WrongOrder(f"the order has {found}; each callable needs a forward, and each forward a backward")
    return most


MOST_SIGNATURES = 8
"""Signatures of a callable that get graphs. The first iteration keeps a copy of the arguments of each."""


@dataclass(slots=True)
class _Seen:
    """Hold the calls of one signature: copies of the first one's arguments, the forwards, and how `most` were live."""

    sample: Sample
    forwards: WeakRegistry[Forward] = field(default_factory=WeakRegistry)
    most: int = 1


class FirstIteration:
    """Run callables eagerly, and count the forwards that are live for each signature of arguments.

    Attributes:
        is_over: whether the iteration has ended.
    """

    def __init__(self, callables: Sequence[Installed]) -> None:
        self._seen: dict[Installed, dict[Hashable, _Seen]] = {one: {} for one in callables}
        self.is_over = False
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, *arguments: Any) -> None:
        seen = [one for of_one in self._seen.values() for one in of_one.values()]
        if seen and not any(forward.over is None for one in seen for forward in one.forwards.alive()):
            self.end()

    def end(self) -> None:
        """End the iteration."""
        self.is_over = True
        self._hook.remove()

    def plan(self) -> Plan:
        """Return the samples of each callable, each with the number of its forwards that were live at one time."""
        every = [(called, *numbered) for called, seen in self._seen.items() for numbered in enumerate(seen.values())]
        return [(called, index, one.sample, one.most) for called, index, one in every]

    def call(self, called: Installed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a callable for a call of the program, and count it."""
        given: list[torch.Tensor] = []
        key, seen = signature((args, kwargs), given), self._seen[called]
        if key not in seen:
            if len(seen) == MOST_SIGNATURES:
                return called.before(*args, **kwargs)
            plain = all(is_plain(one) and not (one.is_quantized or is_lazy_view(one)) for one in given)
            others = (one.detach().requires_grad_(one.requires_grad) for one in given)  # they are refused later
            copies = inputs_like((args, kwargs)).recording_inputs if plain else others
            seen[key] = _Seen(replaced((args, kwargs), iter(copies)))
        returned = called.before(*args, **kwargs)
        forward = Forward()
        for _, one, _ in parts(returned, "result"):
            if getattr(one, "grad_fn", None) is not None and not any(one is tensor for tensor in given):
                one.register_hook(forward)
        seen[key].forwards.add(forward)
        seen[key].most = max(seen[key].most, sum(one.over is None for one in seen[key].forwards.alive()))
        return returned
