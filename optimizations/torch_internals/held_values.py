"""Compares what stands in dicts, lists, closure cells and attributes with what stood there, in one call into C++.

The comparison is a tree of Dynamo's guard nodes, without recursive marks: each call reads every entry. Two entries are
the same if they hold the very same object.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from optimizations import torch_internals

_DICTS = (dict, OrderedDict, defaultdict)


@dataclass(frozen=True, slots=True)
class Held:
    """What stands in a holder.

    Attributes:
        holder: a dict with strings for keys, a list, a closure cell, or an object.
        entries: its keys and values. The only key of a cell is "cell_contents".
        size: how many entries it has; None where that is not compared.
        attributes: the entries are attributes of `holder`.
    """

    holder: Any
    entries: tuple[tuple[Any, Any], ...]
    size: int | None = None
    attributes: bool = False


def can_be_compared(holder: Any, keys: Sequence[Any]) -> bool:
    """Return whether C++ reads these entries of a holder as Python does. It compares keys, element by element."""
    if type(holder) in _DICTS:
        return all(type(key) is str for key in keys)
    return type(holder) in (list, types.CellType)


def same_values(held: Sequence[Held]) -> Callable[[], bool]:
    """Return a function that tells whether the very same objects stand there. It keeps them alive."""
    if not held:
        return lambda: True
    tree = torch_internals.RootGuardManager()
    kind = torch_internals.GuardManagerType.GUARD_MANAGER
    kept = tuple(held)
    for index, one in enumerate(kept):
        name = f"held {index}"
        node = tree.tuple_getitem_manager(index, name, one.holder, kind)
        of_dict = type(one.holder) in _DICTS and not one.attributes
        if one.size is not None:
            (node.add_dict_length_check_guard if of_dict else node.add_length_check_guard)(one.size, (name,), None)
        for key, value in one.entries:
            if one.attributes or type(one.holder) is types.CellType:
                leaf = node.getattr_manager(key, name, value, kind)
            elif of_dict:
                leaf = node.dict_getitem_manager(key, name, value, kind)
            else:
                leaf = node.list_getitem_manager(key, name, value, kind)
            leaf.add_id_match_guard(id(value), (name,), None)
    check, root = tree.check, (tuple([one.holder for one in kept]), kept)

    def same() -> bool:
        return bool(check(root[0]))

    return same
