"""Compare the contents of dicts, lists, closure cells and attributes with earlier ones, in one call into C++.

The comparison is a tree of Dynamo's guard nodes, without recursive marks. Entries are compared by object identity. For
a dict the version is compared, which every write changes: that takes 10 ns, independent of its size. For a dict that
calls write anyway the entries are compared, and C++ reads them only if the version changed.

Since Python 3.12 C++ computes versions by watching dicts. Encore watches them too, and compares no versions while none
of them was written. If watching does not report all writes (3.13.0), entries are compared and always read.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from optimizations import torch_internals
from optimizations.torch_internals.dictionary_writes import ComparedAfterWrites, have_versions, writes_left

_DICTS = (dict, OrderedDict, defaultdict)

FEW_COMPARISONS = 8
"""Comparisons of dicts in Python, after which nodes in C++ are worth making."""


@dataclass(frozen=True, slots=True)
class Held:
    """Hold the value in a holder.

    Attributes:
        holder: a dict, a list, or an object such as a closure cell.
        entries: its keys and values.
        size: how many entries it has; None if that is not compared.
        attributes: the entries are attributes of `holder`.
        is_written: entries of a dict are compared one by one, since others in it are written.
    """

    holder: Any
    entries: tuple[tuple[Any, Any], ...]
    size: int | None = None
    attributes: bool = False
    is_written: bool = False

    @property
    def is_dict(self) -> bool:
        """Return whether C++ reads the holder as a dict."""
        return type(self.holder) in _DICTS and not self.attributes

    @property
    def by_version(self) -> bool:
        """Return whether the count of writes shows that nothing was written."""
        return self.is_dict and not self.is_written and have_versions()

    @property
    def is_comparable(self) -> bool:
        """Return whether C++ reads these entries as Python does. It compares keys, element by element."""
        if self.attributes or self.by_version:
            return True
        return all(type(key) is str for key, _ in self.entries) if self.is_dict else type(self.holder) is list


class HeldValues:
    """Check whether holders still contain the same objects. It keeps these alive."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._kept = tuple(held)
        versions = [one for one in self._kept if one.by_version]
        self._versions = [comparison([one]) for one in versions]
        holders, same_versions = comparison(versions)
        self._unwritten = ComparedAfterWrites(same_versions, holders)
        self._others, self._same_others = comparison([one for one in self._kept if not one.by_version])

    def same(self) -> bool:
        """Return whether each holder has the same objects, and no dict was written except those marked `is_written`."""
        if self._unwritten.seen != writes_left() and not self._unwritten.holds():
            return False
        return self._same_others(self._others)

    def written(self) -> list[dict[Any, Any]]:
        """Return the dicts compared by version that were written since."""
        return [holders[0] for holders, same in self._versions if not same(holders)]


def comparison(held: Sequence[Held]) -> tuple[tuple[Any, ...], Callable[[tuple[Any, ...]], bool]]:
    """Return a tuple of the holders, and a function that checks their contents. It keeps no value alive."""
    tree = torch_internals.RootGuardManager()
    for index, one in enumerate(held):
        _add(tree.tuple_getitem_manager(index, f"held {index}", one.holder, torch_internals.plain_guard_node), one)
    check: Callable[[tuple[Any, ...]], bool] = tree.check
    return tuple([one.holder for one in held]), check


def comparison_when_written(held: Sequence[Held]) -> tuple[tuple[Any, ...], Callable[[tuple[Any, ...]], bool]]:
    """Return what `comparison` returns, for dicts that are only compared after writes, which few programs do.

    To make the nodes takes 40 to 90 us for each tensor, more than a recording for a large model. So the first
    `FEW_COMPARISONS` comparisons are made in Python. All values are kept alive.
    """
    left, made = FEW_COMPARISONS, list[Callable[[tuple[Any, ...]], bool]]()
    sizes = [(one.holder, len(one.holder)) for one in held if not one.is_written]

    def in_python() -> bool:
        return all(len(holder) == size for holder, size in sizes) and all(
            one.holder.get(key, held) is value for one in held for key, value in one.entries
        )

    def same(holders: tuple[Any, ...]) -> bool:
        nonlocal left
        if made:
            return made[0](holders)
        left -= 1
        if left >= 0:
            return in_python()
        check = comparison(held)[1]
        found = in_python()  # after the versions were read: a write in between is seen here or by them
        if found:
            made.append(check)
        return found

    return tuple([one.holder for one in held]), same


def _add(node: Any, one: Held) -> None:
    """Add the comparison of a holder's contents to its node."""
    if one.by_version:
        node.add_dict_version_guard(one.holder, ("version",), None)
        return
    plain = torch_internals.plain_guard_node
    if one.size is not None:
        (node.add_dict_length_check_guard if one.is_dict else node.add_length_check_guard)(one.size, ("size",), None)
    for key, value in one.entries:
        if one.attributes:
            leaf = node.getattr_manager(key, "attribute", value, plain)
        elif one.is_dict:  # the example None lets C++ pass by this entry while the version is the same
            leaf = node.dict_getitem_manager(key, "entry", None if have_versions() else value, plain)
        else:
            leaf = node.list_getitem_manager(key, "member", value, plain)
        leaf.add_id_match_guard(id(value), ("identity",), None)
