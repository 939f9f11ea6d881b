"""Whether dictionaries still hold the objects they held, asked of PyTorch's guards: one call into C++ for all of them.

See `identity_guard` for how such a tree of guards works, and when it walks.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations import torch_internals


@dataclass(frozen=True, slots=True)
class HeldEntries:
    """Entries of a dictionary, as keys and values; `size` is how many it has, None where that does not matter. `absent`
    are keys that it does not have."""

    dictionary: dict[Any, Any]
    entries: tuple[tuple[Any, Any], ...]
    size: int | None
    absent: frozenset[str] = frozenset()


class _Root(torch.nn.Module):
    """What the tree begins at: C++ watches dictionaries below a module."""


def can_be_guarded(dictionary: Any) -> bool:
    """Whether C++ reads the dictionary as Python does. It compares keys, which tensors do element by element."""
    return type(dictionary) in (dict, OrderedDict, defaultdict) and all(type(key) is str for key in dictionary)


def same_entries(held: Sequence[HeldEntries]) -> Callable[[], bool]:
    """A function that tells whether each dictionary still holds the very same objects under these keys, and nothing
    under those that were absent.

    It keeps the dictionaries and the objects alive, for an identity means nothing once its object is gone.
    """
    if not held:
        return lambda: True
    tree = torch_internals.RootGuardManager()
    root = add_entries(tree, 0, held)
    # C++ reads the first of these; the second is kept alive with it.
    return functools.partial(tree.check, (root, tuple(held)))


def add_entries(tree: Any, place: int, held: Sequence[HeldEntries]) -> Any:
    """Add guards of entries at a place of the tuple of `tree`. Returns what has to stand there; it keeps none alive."""
    kind = torch_internals.GuardManagerType.GUARD_MANAGER
    root = _Root()
    for index, one in enumerate(held):
        root.__dict__[f"held {index}"] = one.dictionary
    node = tree.tuple_getitem_manager(place, "root", root, kind)
    attributes = node.get_generic_dict_manager("attributes", root.__dict__, kind)
    for index, one in enumerate(held):
        name = f"held {index}"
        entries = attributes.dict_getitem_manager(name, name, one.dictionary, kind)
        if one.size is not None:
            entries.add_dict_length_check_guard(one.size, (name,), None)
        add_absent(entries, name, one.dictionary, one.entries, one.absent)
        for key, value in one.entries:
            leaf = entries.dict_getitem_manager(key, name, None, kind)
            leaf.add_id_match_guard(id(value), (name,), None)
            leaf.mark_tag_safe()
        entries.mark_tag_safe()
    attributes.mark_tag_safe()
    node.mark_tag_safe()
    node.mark_tag_safe_root()
    return root


def add_absent(
    node: Any,
    name: str,
    dictionary: Mapping[str, Any],
    entries: Iterable[tuple[str, Any]],
    absent: Collection[str],
) -> None:
    """Add guards of a dictionary, which the node stands for, that these keys are absent; others ask for `entries`.

    Many keys may be absent: whatever a module's code takes from its class. A module that was called has all its
    attributes, as a rule. If each of them is still there, and there are not more, no other key can be there. Where that
    takes fewer guards, it is asked instead. Other objects may get any attribute at any time, which means nothing here.
    """
    if not absent:
        return
    compared = {key for key, _ in entries}
    others = [key for key in dictionary if key not in compared]
    of_module = "_parameters" in dictionary
    if of_module and len(others) + 1 < len(absent) and not any(key in dictionary for key in absent):
        node.add_dict_length_check_guard(len(dictionary), (name,), None)
        for key in others:
            node.add_dict_contains_guard(True, key, (name,), None)
        return
    for key in sorted(absent):
        node.add_dict_contains_guard(False, key, (name,), None)
