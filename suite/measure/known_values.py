"""Make fake tensors store their values where these are cheap to compute.

A program that is run on fake tensors stops where the host reads a value (`lengths[row]` as a slice bound, `.item()`,
boolean indexing). Often that value depends only on inputs and constants, and these are small. `KnownValuesMode` is
PyTorch's mode of fake tensors which, in addition to the fake result, computes the real one on the CPU if all arguments
are known and small. Values that depend on weights or on random tensors are unknown, and the analysis ends where they
are read. A single random number that the host draws is known: programs branch on it (LayerDrop does), and any value
will do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from optimizations import torch_internals

LIMIT_ELEMENTS = 2**20
"""Largest tensor whose value is stored: weights should not be computed, and data for control flow is small."""

_CPU = torch.device("cpu")
_VALUE = "known_value"
_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
_FILLING = frozenset({"zero_", "fill_", "random_", "uniform_", "normal_", "bernoulli_", "exponential_"})
"""Operations whose result does not depend on the value of their first argument."""


class UnknownValue(Exception):
    """Report that the host reads a value that is unknown without running the model."""


class KnownValuesMode(torch_internals.FakeTensorMode):
    """Compute values of fake tensors while they are known."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._random_is_known = False
        self._overwritten: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def random_values(self) -> Iterator[None]:
        """Count random numbers as known in the block, for inputs, which may have any value."""
        self._random_is_known = True
        try:
            yield
        finally:
            self._random_is_known = False

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            result = super().dispatch(func, types, args, kwargs)
        except (torch_internals.DataDependentOutputException, torch_internals.DynamicOutputShapeException) as error:
            values = self._evaluate(func, args, kwargs)
            if values is None:
                raise UnknownValue(f"the program reads a value of the model on the host ({func})") from error
            device = next((t.device for t in _tensors((args, kwargs)) if t.device.type != "cpu"), _CPU)
            return _map(values[0], lambda value: self._fake(value, device))
        outputs = list(_tensors(result))
        if outputs and all(output.numel() <= LIMIT_ELEMENTS for output in outputs):
            values = self._evaluate(func, args, kwargs)
            known = list(_tensors(values[0])) if values is not None else []
            for output, value in zip(outputs, known, strict=False):
                setattr(output, _VALUE, value)
            if values is not None:
                return result
        self._forget_written(func, args, kwargs)
        return result

    def value(self, tensor: Tensor) -> Tensor | None:
        """Return the value of a tensor on the CPU, if it is known."""
        known = getattr(tensor, _VALUE, None) if isinstance(tensor, torch_internals.FakeTensor) else tensor
        if known is None or known.device != _CPU or known.untyped_storage().data_ptr() in self._overwritten:
            return None
        return known

    def _evaluate(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any] | None:
        """Return the real result of an operation, in a tuple; None if it is unknown."""
        if not isinstance(func, torch_internals.OpOverload) or func.overloadpacket.__name__ in _UNINITIALISED:
            return None
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random and not self._random_is_known and not _draws_one_number(args, kwargs):
            return None
        if func.overloadpacket.__name__ in _FILLING and self._is_unknown_whole(args[0]):
            args = (torch.empty(args[0].shape, dtype=args[0].dtype, device="cpu"), *args[1:])
        inputs = list(_tensors((args, kwargs)))
        if any(self.value(tensor) is None or tensor.numel() > LIMIT_ELEMENTS for tensor in inputs):
            return None
        try:
            return (func(*_map(args, self._real), **{key: _map(value, self._real) for key, value in kwargs.items()}),)
        except RuntimeError:  # an operation that CPUs do not have
            return None

    def _is_unknown_whole(self, tensor: Tensor) -> bool:
        """Return whether a tensor is unknown and covers all of its memory (otherwise its base would stay unknown).

        A parameter stays unknown when its module fills it, because values that depend on weights must not be known.
        """
        if isinstance(tensor, torch.nn.Parameter):
            return False
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return whole and tensor.numel() <= LIMIT_ELEMENTS and self.value(tensor) is None

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.value(leaf)
        return _CPU if isinstance(leaf, torch.device) else leaf

    def _fake(self, value: Any, device: torch.device) -> Any:
        if not isinstance(value, Tensor):
            return value
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        fake = torch_internals.FakeTensor(self, meta, device)
        setattr(fake, _VALUE, value)
        return fake

    def _forget_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Drop the value of a known tensor, and of its views, after an unknown value was written to it."""
        schema = getattr(func, "_schema", None)
        if schema is None:
            return
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[position] if position < len(args) else kwargs.get(argument.name)
                for tensor in _tensors(written):
                    value = getattr(tensor, _VALUE, None)
                    if value is not None:
                        # The reference prevents that another tensor gets the address.
                        self._overwritten[value.untyped_storage().data_ptr()] = value


def _draws_one_number(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a random operator makes a CPU tensor of rank 0, such as a program branches on."""
    no_dimensions = any(isinstance(argument, (list, tuple)) and not argument for argument in args)
    return no_dimensions and kwargs.get("device") in (None, _CPU)


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in torch_internals.pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _map(value: Any, change: Any) -> Any:
    return torch_internals.pytree.tree_map(change, value)
