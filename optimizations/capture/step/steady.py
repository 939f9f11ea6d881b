"""Check quickly that the arguments of a call look like those that were recorded.

A signature is a value that can be looked up, and making one goes through all of the arguments in Python. After a
recording it is known what they look like. So the way to each tensor is kept, and a call whose arguments look the same
is checked along it: containers are compared by type, length and keys, tensors in bulk, and the settings around the step
by one call into C++. Whatever differs, or is of a kind that is not known here, takes the slow path and is compared by
its signature.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.signature import NUMPY, PLAIN, alias_pattern, attributes, exact, fields, is_dataclass
from optimizations.capture.step.surroundings import kernels_now, modes
from optimizations.torch_internals.tensor_guard import same_metadata

_Take = Callable[[Any, list[Any]], bool]
"""Appends the tensors of a value to a list; False if the value is another."""


class Arguments:
    """Hold what the arguments of a recording look like, and the settings around it. `tensors` are all of theirs."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self._take = _taker_of_call(args, kwargs)
        self._aliases = alias_pattern(tensors)
        self.distinct = len(set(self._aliases)) == len(tensors)
        self.renew(tensors)

    def renew(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take in the settings as they are now: grad mode, autocast, default dtype and others.

        `tensors` are of a call with the same signature: what C++ compares includes settings, such as autocast.
        """
        self._looks = same_metadata(tensors)
        self._settings: Any = torch_internals.GlobalStateGuard().check
        self._inference, self._kernels = torch.is_inference_mode_enabled(), kernels_now()
        self._anomalies = anomalies_now()
        self._modes = modes()

    def tensors_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """Return the tensors of a call that has the signature of the recording; None if it may have another."""
        found = self._take(args, kwargs)
        if found is None or not self._looks(tuple(found)):
            return None
        if len(set(map(id, found))) < len(found) if self.distinct else alias_pattern(found) != self._aliases:
            return None
        if torch.is_inference_mode_enabled() is not self._inference or kernels_now() != self._kernels:
            return None
        if anomalies_now() is not self._anomalies:
            return None
        if modes() != self._modes:
            return None
        return found if self._settings() else None


anomalies_now: Callable[[], bool] = torch.is_anomaly_enabled
"""Whether a backward looks for NaN, which ends it with an error."""

_TakeAll = Callable[[tuple[Any, ...], dict[str, Any]], list[Any] | None]
"""The tensors of a call's arguments, None where it is another."""


def _taker_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _TakeAll:
    """Return what takes the tensors of calls whose arguments are nested like these."""
    count = len(args)
    if not kwargs and all(isinstance(one, torch.Tensor) for one in args):
        return lambda args, kwargs: None if kwargs or len(args) != count else [*args]
    if not kwargs and count == 1 and type(args[0]) is dict and _holds_tensors(args[0]):
        keys = list(args[0])

        def take_dict(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
            if kwargs or not args or args[1:] or type(only := args[0]) is not dict or list(only) != keys:
                return None
            return [*only.values()]

        return take_dict
    if not kwargs and count == 1 and (only := _taker(args[0])) is not None:

        def take_one(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
            found: list[Any] = []
            return found if not kwargs and len(args) == 1 and only(args[0], found) else None

        return take_one
    take_args, take_kwargs = _taker(args) or _never, _taker(kwargs) or _never

    def take(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        found: list[Any] = []
        return found if take_args(args, found) and take_kwargs(kwargs, found) else None

    return take


def _never(value: Any, found: list[Any]) -> bool:
    """Return False, for arguments that are taken apart by their signature only."""
    return False


def _taker(nest: Any) -> _Take | None:
    """Return what takes values that look like `nest`; None for kinds that are taken apart by their signature only."""
    kind = type(nest)
    if isinstance(nest, torch.Tensor):
        return _tensor
    if kind in PLAIN or isinstance(nest, NUMPY):
        if kind in (float, complex) or isinstance(nest, NUMPY):
            wanted = exact(nest)
            return lambda value, found: type(value) is kind and exact(value) == wanted
        return lambda value, found: type(value) is kind and value == nest
    if isinstance(nest, (list, tuple)):
        return _with_attributes(nest, _of_sequence(kind, nest))
    if isinstance(nest, Mapping) and all(type(key) is str for key in nest):
        return _with_attributes(nest, _of_mapping(kind, nest))
    if is_dataclass(nest):
        return _with_attributes(nest, _of_dataclass(kind, nest))
    return None


def _with_attributes(nest: Any, take: _Take | None) -> _Take | None:
    """Return what takes a container that can keep attributes of its own, too."""
    if take is None or not hasattr(nest, "__dict__"):
        return take
    expected = attributes(nest)
    return lambda value, found: take(value, found) and attributes(value) == expected


def _tensor(value: Any, found: list[Any]) -> bool:
    found.append(value)
    return True


def _of_sequence(kind: Any, nest: Sequence[Any]) -> _Take | None:
    members, length = [_taker(member) for member in nest], len(nest)
    if all(member is _tensor for member in members):

        def take_all(value: Any, found: list[Any]) -> bool:
            if type(value) is not kind or len(value) != length:
                return False
            found += value
            return True

        return take_all

    known = [member for member in members if member is not None]
    if len(known) < length:
        return None
    if length == 1:
        (only,) = known
        return lambda value, found: type(value) is kind and len(value) == 1 and only(value[0], found)

    call: Any = operator.call

    def take(value: Any, found: list[Any]) -> bool:
        return type(value) is kind and len(value) == length and all(map(call, known, value, repeat(found)))

    return take


def _of_mapping(kind: Any, nest: Mapping[str, Any]) -> _Take | None:
    keys, values = list(nest), _of_sequence(tuple, tuple(nest[key] for key in nest))
    if values is None:
        return None
    if not keys:
        return lambda value, found: type(value) is kind and not value
    if kind is dict and _holds_tensors(nest):

        def take_values(value: Any, found: list[Any]) -> bool:
            if type(value) is not dict or list(value) != keys:
                return False
            found += value.values()
            return True

        return take_values
    get = operator.itemgetter(*keys)
    members = get if len(keys) > 1 else lambda value: (get(value),)

    def take(value: Any, found: list[Any]) -> bool:
        return type(value) is kind and list(value) == keys and values(members(value), found)

    return take


def _holds_tensors(nest: Mapping[Any, Any]) -> bool:
    """Return whether it holds nothing but tensors, under names."""
    return all(type(key) is str and isinstance(value, torch.Tensor) for key, value in nest.items())


def _of_dataclass(kind: Any, nest: Any) -> _Take | None:
    held = dict(fields(nest))
    values = _of_sequence(tuple, tuple(held.values()))
    if values is None or not held or len(held) < len(dataclasses.fields(nest)):
        return None
    get = operator.attrgetter(*held)
    members = get if len(held) > 1 else lambda value: (get(value),)
    return lambda value, found: type(value) is kind and values(members(value), found)
