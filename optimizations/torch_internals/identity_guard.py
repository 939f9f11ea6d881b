"""Check in C++ whether modules still hold the tensors they held: one call for all of them.

Dynamo's guards are trees of nodes, one for each object on the way to what is guarded. Here the tree is flat. Its root
is a tuple of dictionaries: of each module its `__dict__`, `_parameters`, `_buffers` and `_modules`. Each has a node:

* of `_parameters` and `_modules` the version is compared, which every write changes;
* of `__dict__` and `_buffers`, which programs write in calls, the objects under the names that count are compared, and
  only if the version changed.

Nothing is marked to be skipped (`mark_tag_safe_root`). PyTorch withdrew such marks in 2.12, since they read versions of
dictionaries that may be freed. The dictionaries here are referenced as long as they are compared.

Where Python tells of writes to dictionaries, from 3.12 on, nothing is compared until one of them was written.

What is not compared is whether a module's `__dict__` is still the same object (`module.__dict__ = ...`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.torch_internals.dictionary_writes import ComparedAfterWrites, have_versions
from optimizations.torch_internals.dynamo_call import BUFFERS, MODULES, PARAMETERS


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """List what is read from a module: (name, index in the list of all tensors) of its own, and its submodules."""

    parameters: tuple[tuple[str, int], ...]
    buffers: tuple[tuple[str, int], ...]
    modules: tuple[tuple[str, HeldTensors], ...]


class NotGuarded(Exception):
    """Report a module that keeps its tensors differently from `torch.nn.Module`, so its dictionaries say nothing."""


class Exchanged(Exception):
    """Report that a module no longer holds a parameter that is to be compared from now on."""


def same_tensors(roots: Iterable[tuple[torch.nn.Module, HeldTensors]], tensors: Sequence[Any]) -> ComparedAfterWrites:
    """Return what tells whether these modules hold the very same `tensors`.

    The caller references `tensors` as long as it asks: an identity means nothing once its object is gone.

    Raises:
        Exchanged: another thread exchanged a tensor since the caller read it.
        NotGuarded: a module keeps its tensors in its own way.
    """
    made = _Flat()
    for module, held in roots:
        made.add(module, held, tensors)
    return ComparedAfterWrites(made.tree.check, tuple(made.dictionaries))


class _Flat:
    """Hold a flat tree of guards under construction."""

    def __init__(self) -> None:
        self.tree = torch_internals.RootGuardManager()
        self.dictionaries: list[dict[str, Any]] = []
        self._kind = torch_internals.GuardManagerType.GUARD_MANAGER

    def add(self, module: torch.nn.Module, held: HeldTensors, tensors: Sequence[Any]) -> None:
        attributes = module.__dict__
        names = [
            name
            for name, used in ((PARAMETERS, held.parameters), (BUFFERS, held.buffers), (MODULES, held.modules))
            if used
        ]
        found = {name: _dictionary(module, name) for name in names}
        self._compare_entries(attributes, found)
        if held.parameters:
            self._compare_version(found[PARAMETERS])
            if any(found[PARAMETERS].get(name) is not tensors[index] for name, index in held.parameters):
                raise Exchanged
        if held.buffers:
            self._compare_entries(found[BUFFERS], {name: tensors[index] for name, index in held.buffers})
        if held.modules:
            self._compare_version(found[MODULES])
            for name, inner in held.modules:
                self.add(found[MODULES][name], inner, tensors)

    def _node(self, dictionary: dict[str, Any]) -> Any:
        place = len(self.dictionaries)
        self.dictionaries.append(dictionary)
        return self.tree.tuple_getitem_manager(place, f"dictionary {place}", dictionary, self._kind)

    def _compare_version(self, dictionary: dict[str, Any]) -> None:
        self._node(dictionary).add_dict_version_guard(dictionary, ("version",), None)

    def _compare_entries(self, dictionary: dict[str, Any], expected: dict[str, Any]) -> None:
        """Compare the objects under these names. The example None lets C++ skip them while the version is the same.

        Since Python 3.12 C++ gets versions by watching dictionaries, and 3.13.0 does not tell of all writes.
        """
        node = self._node(dictionary)
        skipped = have_versions()
        for name, value in expected.items():
            example = None if skipped else value
            node.dict_getitem_manager(name, name, example, self._kind).add_id_match_guard(id(value), (name,), None)


def _dictionary(module: torch.nn.Module, name: str) -> Any:
    """Return the dictionary of a module by this name, provided that reading the attribute gives just that."""
    found = module.__dict__.get(name)
    if type(module.__dict__) is not dict or type(found) not in (dict, OrderedDict):
        raise NotGuarded(f"{type(module).__name__} keeps {name} in its own way")
    if getattr(module, name) is not found:
        raise NotGuarded(f"{type(module).__name__} gives another {name} than it has")
    return found
