"""Learning rates that are numbers, and change: handed to the graph as tensors on the GPU.

A number is baked into the kernels of a graph. Optimizers that are made for graphs (`capturable=True`, `fused=True`)
take a tensor of one element instead and read it on the GPU. For the calls that are recorded the tensor stands in the
parameter group; the program keeps its number, and a scheduler changes it as usual. Before a launch a changed number is
written into the tensor, in stream order. The tensor is float32: what an optimizer derives from the number in double
precision, such as `1 - lr * weight_decay`, may differ in the last bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from optimizations.capture.signature import flatten, replaced


def takes_a_tensor(group: dict[str, Any]) -> bool:
    """Whether a parameter group's optimizer reads its learning rate on the GPU if it is a tensor."""
    return bool(group.get("capturable") or group.get("fused"))


class LearningRates:
    """Numbers among the learning rates of a step's optimizers. `patched` counts those that tensors stand for.

    `standing` are these tensors, by the ids of their groups.
    """

    def __init__(self) -> None:
        self._groups: list[dict[str, Any]] = []
        self._seen: list[float] = []
        self.standing: dict[int, torch.Tensor] = {}

    @property
    def patched(self) -> int:
        return len(self.standing)

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Look at the groups of these optimizers from now on."""
        known = {id(group) for group in self._groups}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if id(group) not in known and isinstance(group.get("lr"), (int, float)):
                    self._groups.append(group)
                    self._seen.append(group["lr"])

    def changed(self) -> bool:
        """Whether a number that no tensor stands for yet has changed, and a tensor may stand for it from now on."""
        found = False
        for index, group in enumerate(self._groups):
            value = group.get("lr")
            if id(group) in self.standing or not isinstance(value, (int, float)):
                continue
            if value != self._seen[index]:
                self._seen[index] = value
                if takes_a_tensor(group) and (device := _device(group)) is not None:
                    self.standing[id(group)] = torch.full((), float(value), dtype=torch.float32, device=device)
                    found = True
        return found

    def stands_for(self, group: Any, key: Any) -> bool:
        """Whether a tensor stands for this entry of a parameter group."""
        return key == "lr" and id(group) in self.standing

    def write(self) -> None:
        """Write changed numbers into their tensors, in stream order."""
        if not self.standing:
            return
        for index, group in enumerate(self._groups):
            tensor = self.standing.get(id(group))
            if tensor is not None and group["lr"] != self._seen[index]:
                self._seen[index] = group["lr"]
                with torch.no_grad():
                    tensor.fill_(float(group["lr"]))

    def storages(self) -> frozenset[int]:
        """Where the tensors lie."""
        return frozenset(tensor.untyped_storage().data_ptr() for tensor in self.standing.values())

    def as_numbers(self, returned: Any) -> Any:
        """What a step returned, with the program's numbers where the tensors stand."""
        if not self.standing:
            return returned
        tensors: list[torch.Tensor] = []
        flatten(returned, tensors)
        numbers = {id(self.standing[id(group)]): group["lr"] for group in self._groups if id(group) in self.standing}
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
            (group, group["lr"], tensor, tensor._version)
            for group in self._groups
            if (tensor := self.standing.get(id(group))) is not None
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
