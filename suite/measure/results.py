"""Collect the results of one iteration by name in host memory: outputs, loss, gradients, and changed state.

Results are copied to the host because the next call reuses the memory of a CUDA graph's outputs, and because
references must not increase the peak memory of compiling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from models.instance import Instance
from models.nests import attributes_of
from models.own_program import Called
from models.registry import Inputs
from optimizations import torch_internals
from suite.measure.fingerprint import sketch, texts, words
from suite.measure.iteration import Iterate, seed_all

GRADIENT = "gradient "
BUFFER = "buffer "
"""Beginnings of the names of gradients and of buffers."""


@dataclass(frozen=True, slots=True)
class Results:
    """Hold tensors on the CPU by name: "output['logits']", "loss", "gradient fc.weight", "buffer bn.running_mean",
    "input [0]". Buffers and inputs are there only if the iteration changed them. `uncompared` are outputs that the
    workload leaves out of the comparison with eager; the digest includes them. `bits` are the fingerprints of all
    tensors, if they were computed already."""

    tensors: Mapping[str, torch.Tensor]
    uncompared: Mapping[str, torch.Tensor] = field(default_factory=dict)
    bits: Mapping[str, str] = field(default_factory=dict)

    def digest(self) -> str:
        """Return the SHA-256 over names, dtypes, shapes and fingerprints of the bytes."""
        return digest_of(self.all_bits())

    def is_finite(self) -> bool:
        """Return whether no gradient has an infinity or NaN, which a sum has, too."""
        gradients = (tensor for name, tensor in self.tensors.items() if name.startswith(GRADIENT))
        return all(bool(gradient.sum().isfinite()) for gradient in gradients)

    def all_bits(self) -> Mapping[str, str]:
        """Return dtype, shape and fingerprint of each tensor, as a text by name."""
        return self.bits or _bits({**self.uncompared, **self.tensors})


class State:
    """Save the tensors that an iteration may change in place: the module's buffers and the inputs.

    For a user's function these include parameters and the state of optimizers.

    Their values at the time of construction are stored in host memory, so that every checked iteration starts from
    them.
    """

    def __init__(self, module: torch.nn.Module, inputs: Inputs) -> None:
        self._own = module if isinstance(module, Called) else None
        live = {} if self._own else {f"{BUFFER}{name}": tensor.detach() for name, tensor in module.named_buffers()}
        live |= {f"input {name}": tensor for name, tensor in named_tensors([*inputs.args, dict(inputs.kwargs)])}
        self._fixed = live
        self._saved = {name: _to_host(tensor) for name, tensor in self._live().items()}
        self._bits = _bits(self._live())

    def _live(self) -> dict[str, torch.Tensor]:
        """Return the current tensors. A compiled optimizer replaces step counts by tensors on the GPU."""
        if self._own is None:
            return self._fixed
        return {f"{BUFFER}{name}": tensor.detach() for name, tensor in self._own.state()} | self._fixed

    def changed(self) -> dict[str, torch.Tensor]:
        """Return the current values of tensors whose bits differ from the saved ones."""
        live = self._live()
        return {name: live[name] for name, bits in _bits(live).items() if bits != self._bits.get(name, bits)}

    def restore(self, changed: Iterable[str] | None = None) -> None:
        """Restore the saved values of changed tensors in place. `changed`: their names, if known."""
        live = self._live()
        with torch.no_grad():
            for name in self.changed() if changed is None else changed:
                live[name].copy_(self._saved[name])

    def saved(self, name: str) -> torch.Tensor | None:
        """Return the saved value of a buffer or input, on the CPU; None if `name` is neither."""
        return self._saved.get(name)


def run_checked(instance: Instance, iterate: Iterate, inputs: Inputs, state: State, seed: int) -> Results:
    """Return results of one iteration from the saved state and `seed`; clear up state and gradients afterwards."""
    tensors: dict[str, torch.Tensor] = {}
    uncompared: dict[str, torch.Tensor] = {}
    bits = _Bits()
    for name, tensor, compared in _computed(instance, iterate, inputs, state, seed):
        bits.add(name, tensor)
        (tensors if compared else uncompared)[name] = _to_host(tensor)
    return Results(tensors, uncompared, bits.all())


def bits_of_run(
    instance: Instance, iterate: Iterate, inputs: Inputs, state: State, seed: int, sketched: Collection[str] = ()
) -> tuple[dict[str, str], dict[str, list[float]]]:
    """Return `run_checked(...).all_bits()` without copies to the host, and sketches of the named tensors."""
    found = _Bits()
    sketches: dict[str, list[float]] = {}
    for name, tensor, _ in _computed(instance, iterate, inputs, state, seed):
        found.add(name, tensor)
        if name in sketched:
            sketches[name] = sketch(tensor)
    return found.all(), sketches


def run_unchecked(instance: Instance, iterate: Iterate, inputs: Inputs, state: State, seed: int) -> None:
    """Run the same iteration as `run_checked`, and drop its results."""
    for _ in _computed(instance, iterate, inputs, state, seed):
        pass


def _computed(
    instance: Instance, iterate: Iterate, inputs: Inputs, state: State, seed: int
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield each result of one iteration: its name, the tensor, and whether it is compared with eager."""
    state.restore()
    _drop_gradients(instance.module)
    seed_all(seed)
    outcome = iterate(inputs)
    kept = instance.workload.kept
    output = outcome.output if kept is None else kept(outcome.output)
    compared = instance.workload.compared
    for name, tensor in named_tensors(output):
        yield (f"output{name}", tensor, True) if compared is None else (f"uncompared output{name}", tensor, False)
    if compared is not None:
        for name, tensor in named_tensors(compared(output)):
            yield f"output{name}", tensor, True
    if outcome.loss is not None:
        yield "loss", outcome.loss, True
    for name, parameter in instance.module.named_parameters():
        if parameter.grad is not None:
            yield GRADIENT + name, parameter.grad, True
    changed = state.changed()
    for name, tensor in changed.items():
        yield name, tensor, True
    _drop_gradients(instance.module)
    state.restore(changed)


def digest_of(bits: Mapping[str, str]) -> str:
    """Return the SHA-256 over names and bits of tensors."""
    return hashlib.sha256("\0".join(f"{name}\0{each}" for name, each in sorted(bits.items())).encode()).hexdigest()


class _Bits:
    """Collect dtypes, shapes and fingerprints of tensors one by one, so that each can be freed before the next."""

    def __init__(self) -> None:
        self._forms: dict[str, str] = {}
        self._words: dict[str, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._forms[name] = f"{tensor.dtype} {tuple(tensor.shape)}"
        self._words[name] = words(tensor)

    def all(self) -> dict[str, str]:
        found = zip(self._forms.items(), texts(list(self._words.values())), strict=True)
        return {name: f"{form} {text}" for (name, form), text in found}


def _bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    bits = _Bits()
    for name, tensor in tensors.items():
        bits.add(name, tensor)
    return bits.all()


def named_tensors(value: Any, *, numbers: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors and numbers in `value` with the path to each, as "['logits']" or "[0].layers[2].keys".

    Containers are those registered in PyTorch's pytree (including the output classes of transformers), and subclasses
    of lists, tuples and dicts; attributes of other objects, such as key and value caches, are searched. With `numbers`,
    numbers are yielded as 0-dim tensors.
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
        elif not isinstance(leaf, type) and id(leaf) not in seen:
            seen.add(id(leaf))
            for step, member in _inside(leaf):
                yield from _walk(member, name + step, seen, numbers)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the contents of an object that is not registered in pytree, such as a subclass of list, with paths."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", member) for key, member in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", member) for index, member in enumerate(value))
    attributes = attributes_of(value) or getattr(value, "__dict__", {})
    yield from ((f".{name}", member) for name, member in attributes.items())


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that shares no memory with `tensor`, contiguous, on the CPU."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _drop_gradients(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None
