"""Learning rates that are numbers, and change: handed to the graph as tensors on the GPU.

A number is baked into the kernels of a graph. Optimizers that are made for graphs (`capturable=True`, `fused=True`)
take a tensor of one element instead and read it on the GPU. For the calls that are recorded the tensor stands in the
parameter group; the program keeps its number, and a scheduler changes it as usual. Before a launch a changed number is
written into the tensor, in stream order. The tensor is float32: what an optimizer derives from the number in double
precision, such as `1 - lr * weight_decay`, may differ in the last bit.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from optimizations.capture.signature import flatten, replaced


def takes_a_tensor(group: dict[str, Any]) -> bool:
    """Whether a parameter group's optimizer reads its learning rate on the GPU if it is a tensor."""
    return bool(group.get("capturable") or group.get("fused"))


@dataclass(slots=True, eq=False)
class _Watched:
    """A parameter group, the number that was seen in it last (None: unknown), and the optimizer that has it."""

    group: dict[str, Any]
    seen: Any
    optimizer: weakref.ref[torch.optim.Optimizer]

    def lasts(self) -> bool:
        """Whether the optimizer has the group still: `load_state_dict` makes others."""
        optimizer = self.optimizer()
        return optimizer is not None and any(one is self.group for one in optimizer.param_groups)


class LearningRates:
    """Numbers among the learning rates of a step's optimizers. `patched` counts those that tensors stand for.

    `standing` are these tensors, by the ids of their groups. Groups hold parameters, so those of an optimizer that is
    gone are let go at once.
    """

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self.standing: dict[int, torch.Tensor] = {}

    @property
    def patched(self) -> int:
        return len(self.standing)

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Look at the groups of these optimizers from now on."""
        self._let_go()
        known = {id(one.group) for one in self._watched}
        here = weakref.ref(self)

        def is_gone(optimizer: object) -> None:
            if (rates := here()) is not None:
                rates._let_go()

        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if id(group) not in known and isinstance(group.get("lr"), Real):
                    found = _Watched(group, group["lr"], weakref.ref(optimizer, is_gone))
                    self._watched.append(found)

    def _let_go(self) -> None:
        if all(left := [one.lasts() for one in self._watched]):
            return
        self._watched = [one for one, lasts in zip(self._watched, left, strict=True) if lasts]
        kept = {id(one.group) for one in self._watched}
        self.standing = {key: tensor for key, tensor in self.standing.items() if key in kept}

    def changed(self) -> bool:
        """Whether a number that no tensor stands for yet has changed, and a tensor may stand for it from now on."""
        found = False
        for one in self._watched:
            group, value = one.group, one.group.get("lr")
            if id(group) in self.standing or not isinstance(value, Real):
                continue
            if value != one.seen:
                one.seen = value
                if takes_a_tensor(group) and (device := _device(group)) is not None:
                    with torch.inference_mode(False):  # it is written in calls of other modes, too
                        self.standing[id(group)] = torch.full((), float(value), dtype=torch.float32, device=device)
                    found = True
        return found

    def stands_for(self, group: Any, key: Any) -> bool:
        """Whether a tensor stands for this entry of a parameter group."""
        return key == "lr" and id(group) in self.standing

    def write(self) -> None:
        """Write changed numbers into their tensors, in stream order.

        Where the program has put a tensor of its own, that may be written at any time, so it is copied in each call.
        """
        if not self.standing:
            return
        for one in self._watched:
            if (tensor := self.standing.get(id(one.group))) is None:
                continue
            rate = one.group["lr"]
            if isinstance(rate, torch.Tensor):
                one.seen = None
                tensor.copy_(rate.detach().reshape(()))
            elif rate != one.seen:
                one.seen = None  # until it is written: a call may end in between
                tensor.fill_(float(rate))
                one.seen = rate

    def storages(self) -> frozenset[int]:
        """Where the tensors lie."""
        return frozenset(tensor.untyped_storage().data_ptr() for tensor in self.standing.values())

    def as_numbers(self, returned: Any) -> Any:
        """What a step returned, with the program's numbers where the tensors stand."""
        if not self.standing:
            return returned
        tensors: list[torch.Tensor] = []
        flatten(returned, tensors)
        groups = [one.group for one in self._watched]
        numbers = {id(self.standing[id(group)]): group["lr"] for group in groups if id(group) in self.standing}
        if numbers.keys().isdisjoint(map(id, tensors)):
            return returned
        return replaced(returned, iter([numbers.get(id(tensor), tensor) for tensor in tensors]))

    @contextlib.contextmanager
    def as_tensors(self) -> Iterator[None]:
        """The tensors stand in their groups inside the block.

        One that the program changes there is the program's number behind it, which waits for the GPU: such a step is
        refused, and runs with numbers from then on.
        """
        self.write()
        standing = [
            (one.group, one.group["lr"], tensor, tensor._version)
            for one in self._watched
            if (tensor := self.standing.get(id(one.group))) is not None
        ]
        for group, _, tensor, _ in standing:
            group["lr"] = tensor
        try:
            yield
        finally:
            for group, number, tensor, version in standing:
                standing_now: Any = group.get("lr")
                if standing_now is tensor:
                    group["lr"] = number if tensor._version == version else float(tensor)


def _device(group: dict[str, Any]) -> torch.device | None:
    devices = {parameter.device for parameter in group["params"]}
    return devices.pop() if len(devices) == 1 else None
