"""Pass learning rates and betas that are numbers, and change, to the graph as tensors on the GPU.

A number is baked into the kernels of a graph. Optimizers that are made for graphs (`capturable=True`, `fused=True`)
take a tensor of one element instead and read it on the GPU. For the calls that are recorded the tensor stands in the
parameter group; the program keeps its number, and a scheduler changes it as usual. Before a launch a changed number is
written into the tensor, in stream order. That of a learning rate is float32; what an optimizer derives from the number
in double precision, such as `1 - lr * weight_decay`, may differ in the last bit.

Note [Betas]. Schedulers with `cycle_momentum` change the first beta. Adam and AdamW take a tensor for it, but not where
they are fused. That tensor is float64, so that `1 - beta` is what Python makes of the number. The second beta stays a
number. It stands in a tuple that changes on every call, so it is compared apart from it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from optimizations.capture.signature import exact, flatten, replaced
from optimizations.capture.step.host_state import Entry, HostState, entries_of
from optimizations.torch_internals.foreach_scalars import tensors_for_numbers

RATE, BETAS = "lr", "betas"
NAMES = {RATE: "the learning rate", BETAS: "a beta"}
_DTYPES = {RATE: torch.float32, BETAS: torch.float64}
_EXACT = (torch.float32, torch.float64)
"""Parameters of other dtypes take betas that are rounded to theirs."""


def made_for_graphs(group: dict[str, Any]) -> bool:
    """Return whether a group's optimizer counts on the GPU, and reads a learning rate there that is a tensor."""
    return bool(group.get("capturable") or group.get("fused"))


def takes_betas(optimizer: torch.optim.Optimizer | None, group: dict[str, Any]) -> bool:
    """Return whether a parameter group's optimizer reads its first beta on the GPU if it is a tensor. Note [Betas]."""
    return (
        isinstance(optimizer, torch.optim.Adam)
        and getattr(type(optimizer).step, "__module__", None) == torch.optim.Adam.__module__  # not one of its own
        and bool(group.get("capturable"))
        and not group.get("fused")
        and all(parameter.dtype in _EXACT for parameter in group["params"])
    )


Key = tuple[int, str]
"""The identity of a parameter group, and which of its entries."""


@dataclass(slots=True, eq=False)
class _Watched:
    """Hold an entry of a parameter group, the number that was seen in it last (None: unknown), and the optimizer.

    `set_inside`: the step itself puts other numbers there, perhaps made of the one before. It is given numbers then: of
    a tensor it would make one that is rounded, and that the program goes on with.
    """

    group: dict[str, Any]
    name: str
    seen: Any
    optimizer: weakref.ref[torch.optim.Optimizer]
    set_inside: bool = False

    @property
    def key(self) -> Key:
        return id(self.group), self.name

    def number(self) -> Any:
        """Return the number, or what stands in its place; None if there is none."""
        return number_in(self.group, self.name)

    def put(self, value: Any) -> None:
        """Let the entry hold this number or tensor."""
        self.group[self.name] = value if self.name == RATE else (value, *self.group[BETAS][1:])

    def takes_a_tensor(self) -> bool:
        if self.set_inside:
            return False
        return made_for_graphs(self.group) if self.name == RATE else takes_betas(self.optimizer(), self.group)

    def lasts(self) -> bool:
        """Return whether the optimizer has the group still: `load_state_dict` makes others."""
        optimizer = self.optimizer()
        return optimizer is not None and any(one is self.group for one in optimizer.param_groups)


def number_in(group: dict[str, Any], name: str) -> Any:
    """Return the learning rate or the first beta of a parameter group; None if it has none."""
    value = group.get(name)
    if name == RATE:
        return value
    return value[0] if isinstance(value, (tuple, list)) and value else None


class LearningRates:
    """Watch numbers among learning rates and betas of a step's optimizers. `patched` counts those with tensors.

    `standing` are these tensors, by their groups and entries. Groups hold parameters, so those of an optimizer that is
    gone are let go at once.
    """

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self.standing: dict[Key, torch.Tensor] = {}

    @property
    def patched(self) -> int:
        return len(self.standing)

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Watch the groups of these optimizers from now on."""
        self._let_go()
        known = {one.key for one in self._watched}
        here = weakref.ref(self)

        def is_gone(optimizer: object) -> None:
            if (rates := here()) is not None:
                rates._let_go()

        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for name in (RATE, BETAS):
                    number = number_in(group, name)
                    if (id(group), name) not in known and isinstance(number, Real):
                        found = _Watched(group, name, number, weakref.ref(optimizer, is_gone))
                        self._watched.append(found)

    def _let_go(self) -> None:
        if all(left := [one.lasts() for one in self._watched]):
            return
        self._watched = [one for one, lasts in zip(self._watched, left, strict=True) if lasts]
        kept = {one.key for one in self._watched}
        self.standing = {key: tensor for key, tensor in self.standing.items() if key in kept}

    def changed(self) -> bool:
        """Return whether a number without a tensor has changed, and a tensor may stand for it from now on."""
        found = False
        for one in self._watched:
            value = one.number()
            if one.key in self.standing or not isinstance(value, Real):
                continue
            if value != one.seen:
                one.seen = value
                if one.takes_a_tensor() and (device := _device(one.group)) is not None:
                    with torch.inference_mode(False):  # it is written in calls of other modes, too
                        made = torch.full((), float(value), dtype=_DTYPES[one.name], device=device)
                    self.standing[one.key] = made
                    found = True
        return found

    def stands_for(self, group: Any, key: Any) -> bool:
        """Return whether a tensor stands for this entry of a parameter group, or for a part of it."""
        return key in (RATE, BETAS) and (id(group), key) in self.standing

    def compared_apart(self) -> list[tuple[str, Callable[[], Hashable]]]:
        """Return what else stands in entries for which a tensor stands, as names and functions that give it."""
        groups = [one.group for one in self._watched if one.name == BETAS and one.key in self.standing]
        return [("optimizer.param_groups[...]['betas']", functools.partial(_other_betas, group)) for group in groups]

    def write(self) -> None:
        """Write changed numbers into their tensors, in stream order.

        Where the program has put a tensor of its own, that may be written at any time, so it is copied in each call.
        """
        if not self.standing:
            return
        for one in self._watched:
            if (tensor := self.standing.get(one.key)) is None:
                continue
            rate = one.number()
            if isinstance(rate, torch.Tensor):
                one.seen = None
                tensor.copy_(rate.detach().reshape(()))
            elif rate != one.seen:
                one.seen = None  # until it is written: a call may end in between
                tensor.fill_(float(rate))
                one.seen = rate

    def storages(self) -> dict[int, str]:
        """Return where the tensors lie, and what they stand for."""
        return {tensor.untyped_storage().data_ptr(): NAMES[name] for (_, name), tensor in self.standing.items()}

    def as_numbers(self, value: Any, is_number: Callable[[torch.Tensor], bool] = lambda tensor: False) -> Any:
        """Return what a step returned or keeps, with the program's numbers for the tensors; itself if there are none.

        `is_number`: whether a tensor was computed of these, and would be a number.
        """
        if not self.standing:
            return value
        tensors: list[torch.Tensor] = []
        flatten(value, tensors)
        numbers = {id(self.standing[one.key]): one.number() for one in self._watched if one.key in self.standing}
        numbers |= {id(tensor): float(tensor) for tensor in tensors if id(tensor) not in numbers and is_number(tensor)}
        if numbers.keys().isdisjoint(map(id, tensors)):
            return value
        return replaced(value, iter([numbers.get(id(tensor), tensor) for tensor in tensors]))

    def left_as_numbers(
        self,
        state: HostState,
        before: Sequence[Any],
        is_number: Callable[[torch.Tensor], bool] = lambda tensor: False,
    ) -> bool:
        """Let what a step bound to such tensors hold numbers, after `as_tensors`; return whether there was something.

        `before` is a snapshot of the state from before the step.
        """
        found = False
        for container, old in zip(state.containers, before, strict=True) if self.standing else ():
            if isinstance(container.held, set):
                continue
            then = dict(entries_of(container, old))
            for key, value in list(entries_of(container, container.content())):
                if then.get(key, self) is not value and (number := self.as_numbers(value, is_number)) is not value:
                    Entry(container, key).bind(number)
                    found = True
        return found

    @contextlib.contextmanager
    def as_tensors(self) -> Iterator[None]:
        """Let the tensors stand in their groups inside the block.

        One that the program changes there is the program's number after it, which waits for the GPU: such a step is
        refused, and runs with numbers from then on.
        """
        self.write()
        standing = [
            (one, one.group[one.name], tensor, tensor._version)
            for one in self._watched
            if (tensor := self.standing.get(one.key)) is not None
        ]
        numbers = [(one, one.number()) for one in self._watched if one.key not in self.standing]
        for one, _, tensor, _ in standing:
            one.put(tensor)
        has_betas = any(one.name == BETAS for one, *_ in standing)
        try:
            with tensors_for_numbers() if has_betas else contextlib.nullcontext():
                yield
        finally:
            for one, number in numbers:
                one.set_inside = one.set_inside or one.number() is not number
            for one, before, tensor, version in standing:
                if tensor._version != version:
                    one.seen = None  # it holds another number than was written
                standing_now: Any = one.number()
                if standing_now is not tensor:
                    continue
                if tensor._version == version and _rest(one, before):
                    one.group[one.name] = before
                else:
                    number = before if one.name == RATE else before[0]
                    one.put(number if tensor._version == version else float(tensor))


def _other_betas(group: dict[str, Any]) -> Hashable:
    betas = group[BETAS]
    return len(betas), *map(exact, betas[1:])


def _rest(one: _Watched, before: Any) -> bool:
    """Return whether an entry holds, apart from the number, what it held."""
    return one.name == RATE or tuple(one.group[BETAS][1:]) == tuple(before[1:])


def _device(group: dict[str, Any]) -> torch.device | None:
    devices = {parameter.device for parameter in group["params"]}
    return devices.pop() if len(devices) == 1 else None
