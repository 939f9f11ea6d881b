"""Whether modules still hold the tensors they held, asked of PyTorch's guards: one call into C++ for all of them.

Dynamo's guards are trees of managers, one for each object on the way to what is guarded. Here a tree leads from an
argument that is a module to each tensor, and each leaf compares an identity. The tree is marked as Dynamo marks its own
(`GuardManagerWrapper.find_tag_safe_roots`): once it held, C++ compares only the versions of the dictionaries on the
way, and walks the tree again when one of them changed. After such a change it always walks, so a tree is made new when
that happens and calls go on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.torch_internals.dynamo_call import BUFFERS, MODULES, PARAMETERS


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """What is looked at in a module: (name, index in the list of all tensors) of its own, and its submodules."""

    parameters: tuple[tuple[str, int], ...]
    buffers: tuple[tuple[str, int], ...]
    modules: tuple[tuple[str, HeldTensors], ...]


class NotGuarded(Exception):
    """A module keeps its tensors in another way than `torch.nn.Module` does, so C++ cannot be asked."""


def same_tensors(
    roots: Sequence[tuple[int, torch.nn.Module, HeldTensors]], tensors: Sequence[Any]
) -> Callable[[tuple[Any, ...]], bool]:
    """A function of a call's arguments that tells whether each module still holds the very same `tensors`.

    `roots` gives the position of each module in the arguments. The function keeps neither modules nor tensors alive:
    its caller must keep `tensors`, for an identity means nothing once its object is gone.

    Raises:
        NotGuarded: a module keeps its tensors in its own way.
    """
    tree = torch_internals.RootGuardManager()
    kind = torch_internals.GuardManagerType.GUARD_MANAGER
    for position, module, held in roots:
        node = tree.tuple_getitem_manager(position, "module", module, kind)
        _add_module(node, module, held, tensors, kind)
        node.mark_tag_safe_root()
    check: Callable[[tuple[Any, ...]], bool] = tree.check
    return check


def _add_module(node: Any, module: torch.nn.Module, held: HeldTensors, tensors: Sequence[Any], kind: Any) -> None:
    attributes = node.get_generic_dict_manager("attributes", module.__dict__, kind)
    for dictionary, names in ((PARAMETERS, held.parameters), (BUFFERS, held.buffers)):
        if not names:
            continue
        values = _dictionary(module, dictionary)
        entries = attributes.dict_getitem_manager(dictionary, dictionary, values, kind)
        for name, index in names:
            leaf = entries.dict_getitem_manager(name, name, None, kind)
            leaf.add_id_match_guard(id(tensors[index]), (name,), None)
            leaf.mark_tag_safe()
        entries.mark_tag_safe()
    if held.modules:
        values = _dictionary(module, MODULES)
        entries = attributes.dict_getitem_manager(MODULES, MODULES, values, kind)
        for name, inner in held.modules:
            submodule = entries.dict_getitem_manager(name, name, values[name], kind)
            _add_module(submodule, values[name], inner, tensors, kind)
        entries.mark_tag_safe()
    attributes.mark_tag_safe()
    node.mark_tag_safe()


def _dictionary(module: torch.nn.Module, name: str) -> Any:
    """The dictionary of a module by this name, provided that reading the attribute gives just that."""
    found = module.__dict__.get(name)
    if type(found) not in (dict, OrderedDict) or getattr(module, name) is not found:
        raise NotGuarded(f"{type(module).__name__} keeps {name} in its own way")
    return found
