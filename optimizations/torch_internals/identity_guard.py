"""Check in C++ whether modules still hold the tensors they held: one call for all of them.

Dynamo's guards are trees with one node for each object on the path to the guarded value. Here the tree is flat. Its
root is a tuple of dictionaries: each module's `__dict__`, `_parameters`, `_buffers` and `_modules`. Each has a node:

* for `_parameters` and `_modules` the version is compared, which every write changes;
* for `__dict__` and `_buffers`, which programs write in calls, the objects under the relevant names are compared, and
  only if the version changed.

Nothing is marked to be skipped (`mark_tag_safe_root`). PyTorch withdrew such marks in 2.12, since they read versions of
dictionaries that may be freed. The dictionaries here are referenced as long as they are compared.

From Python 3.12 on, which reports writes to dictionaries, nothing is compared until one of them was written, and the
tree is only made if that happens often (`comparison_when_written`).

The identity of a module's `__dict__` itself is not compared (`module.__dict__ = ...`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from optimizations.torch_internals.dictionary_writes import ComparedAfterWrites, can_be_watched
from optimizations.torch_internals.dynamo_call import BUFFERS, MODULES, PARAMETERS
from optimizations.torch_internals.held_values import Held, comparison, comparison_when_written


@dataclass(slots=True)
class HeldTensors:
    """List a module's tensors by name, as indices in the list of all tensors, and its submodules."""

    parameters: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    modules: dict[str, HeldTensors] = field(default_factory=dict)


class NotGuarded(Exception):
    """Report a module that stores its tensors differently from `torch.nn.Module`, so its dictionaries are no proof."""


class Exchanged(Exception):
    """Report that a module no longer holds a tensor that is to be compared from now on."""


def same_tensors(roots: Iterable[tuple[torch.nn.Module, HeldTensors]], tensors: Sequence[Any]) -> ComparedAfterWrites:
    """Return a check whether these modules still hold the same `tensors`.

    The caller must keep `tensors` alive while it uses the check: an id is only valid while its object lives.

    Raises:
        Exchanged: another thread exchanged a tensor since the caller read it.
        NotGuarded: a module keeps its tensors in its own way.
    """
    compared = comparison_when_written if can_be_watched() else comparison
    holders, same = compared([one for module, held in roots for one in _dictionaries(module, held, tensors)])
    return ComparedAfterWrites(same, holders)


def _dictionaries(module: torch.nn.Module, held: HeldTensors, tensors: Sequence[Any]) -> Iterator[Held]:
    """Yield the dictionaries of a module and its submodules, with the expected contents."""
    used = (PARAMETERS, held.parameters), (BUFFERS, held.buffers), (MODULES, held.modules)
    found = {name: _dictionary(module, name) for name, names in used if names}
    yield Held(module.__dict__, tuple(found.items()), is_written=True)
    for kept, indices in used[:2]:
        expected = tuple((name, tensors[index]) for name, index in indices.items())
        if any(found[kept].get(name) is not value for name, value in expected):
            raise Exchanged
        if expected:
            yield Held(found[kept], expected, is_written=kept == BUFFERS)
    if held.modules:
        yield Held(found[MODULES], tuple((name, found[MODULES][name]) for name in held.modules))
        for name, inner in held.modules.items():
            yield from _dictionaries(found[MODULES][name], inner, tensors)


def _dictionary(module: torch.nn.Module, name: str) -> Any:
    """Return the dictionary of a module by this name, if reading the attribute returns exactly that dictionary."""
    found = module.__dict__.get(name)
    if type(module.__dict__) is not dict or type(found) not in (dict, OrderedDict):
        raise NotGuarded(f"{type(module).__name__} keeps {name} in its own way")
    if getattr(module, name) is not found:
        raise NotGuarded(f"{type(module).__name__} gives another {name} than it has")
    return found
