"""Everything one iteration computed, by name, in host memory: outputs, loss, gradients, and the state it changed.

Results are copied to the host because the memory of a CUDA graph's outputs is used again by the next call, and
because references must not take part in the peak memory of compiling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from models.instance import Instance
from models.registry import Inputs
from optimizations import torch_internals
from suite.iteration import Iterate, seed_all

GRADIENT = "gradient "

CHUNK_BYTES = 2**26
"""Bytes compared at once with a saved state."""


@dataclass(frozen=True, slots=True)
class Results:
    """Tensors on the CPU by name: "output['logits']", "loss", "gradient fc.weight", "buffer bn.running_mean",
    "input [0]". Buffers and inputs are there only if the iteration changed them. `uncompared` are outputs that the
    workload leaves out of the comparison with eager; they count for the digest."""

    tensors: Mapping[str, torch.Tensor]
    uncompared: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def digest(self) -> str:
        """SHA-256 over names, dtypes, shapes and bytes."""
        digest = hashlib.sha256()
        for name, tensor in sorted({**self.uncompared, **self.tensors}.items()):
            digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            digest.update(_bytes_of(tensor).numpy().data)
        return digest.hexdigest()


class State:
    """Tensors outside of the outputs that an iteration may change: the module's buffers and the inputs.

    Their values at the time of construction are kept in host memory, so that every checked iteration starts from them.
    """

    def __init__(self, module: torch.nn.Module, inputs: Inputs) -> None:
        live = {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
        live |= {f"input {name}": tensor for name, tensor in named_tensors([*inputs.args, dict(inputs.kwargs)])}
        self._live = live
        self._saved = {name: _to_host(tensor) for name, tensor in live.items()}

    def changed(self) -> dict[str, torch.Tensor]:
        """Copies of the tensors whose bits are no longer the saved ones."""
        return {name: _to_host(self._live[name]) for name in self._changed_names()}

    def restore(self) -> None:
        """Give the changed tensors their saved values back, at their addresses."""
        with torch.no_grad():
            for name in self._changed_names():
                self._live[name].copy_(self._saved[name])

    def saved(self, name: str) -> torch.Tensor | None:
        """The value from the start of a buffer or input, on the CPU; None if `name` is neither."""
        return self._saved.get(name)

    def _changed_names(self) -> list[str]:
        return [name for name, tensor in self._live.items() if not _same_bits(tensor, self._saved[name])]


def run_checked(instance: Instance, iterate: Iterate, inputs: Inputs, state: State, seed: int) -> Results:
    """Results of one iteration from the saved state and `seed`; state and gradients are cleared up afterwards."""
    state.restore()
    _drop_gradients(instance.module)
    seed_all(seed)
    outcome = iterate(inputs)
    kept = instance.workload.kept
    output = outcome.output if kept is None else kept(outcome.output)
    tensors = {f"output{name}": _to_host(tensor) for name, tensor in named_tensors(output)}
    uncompared: dict[str, torch.Tensor] = {}
    if instance.workload.compared is not None:
        uncompared = {f"uncompared {name}": tensor for name, tensor in tensors.items()}
        compared = named_tensors(instance.workload.compared(output))
        tensors = {f"output{name}": _to_host(tensor) for name, tensor in compared}
    if outcome.loss is not None:
        tensors["loss"] = _to_host(outcome.loss)
    for name, parameter in instance.module.named_parameters():
        if parameter.grad is not None:
            tensors[GRADIENT + name] = _to_host(parameter.grad)
    tensors |= state.changed()
    _drop_gradients(instance.module)
    state.restore()
    return Results(tensors, uncompared)


def named_tensors(value: Any, *, numbers: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors and numbers in `value` with the path to each, as "['logits']" or "[0].layers[2].keys".

    Containers are what PyTorch's pytree knows (also the output classes of transformers); other objects, such as key
    and value caches, are looked into by their attributes. A number comes as a 0-dim tensor, if `numbers` are wanted.
    """
    yield from _walk(value, "", set(), numbers)


def _walk(value: Any, path: str, seen: set[int], numbers: bool) -> Iterator[tuple[str, torch.Tensor]]:
    pytree = torch_internals.pytree
    for keys, leaf in pytree.tree_flatten_with_path(value)[0]:
        name = path + pytree.keystr(keys)
        if isinstance(leaf, torch.Tensor):
            yield name, leaf
        elif isinstance(leaf, (bool, int, float, complex)):
            if numbers:
                yield name, torch.tensor(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type) and id(leaf) not in seen:
            seen.add(id(leaf))
            for attribute, member in vars(leaf).items():
                yield from _walk(member, f"{name}.{attribute}", seen, numbers)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that shares no memory with `tensor`, contiguous, on the CPU."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _same_bits(live: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether a tensor on any device has the bits of one on the CPU; a part at a time, to take little device memory."""
    parts = zip(_bytes_of(live).split(CHUNK_BYTES), _bytes_of(saved).split(CHUNK_BYTES), strict=True)
    return all(torch.equal(part, saved_part.to(part.device)) for part, saved_part in parts)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as a 1-dim uint8 tensor on its device."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _drop_gradients(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None
