"""Whether tensors look as others did, and values stand where they stood, asked of PyTorch's guards in one call each.

See `identity_guard` for how such a tree of guards works. Nothing here is marked to be skipped: each call looks at all.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.torch_internals.compiled_entries import CompiledEntries
from optimizations.torch_internals.dict_guard import HeldEntries, add_absent, add_entries
from optimizations.torch_internals.tensor_guard import compare_metadata, compare_metadata_of_each
from optimizations.torch_internals.tensor_words import TensorWords

_DICTS = (dict, OrderedDict, defaultdict)


def same_gradients(
    parameters: Sequence[torch.Tensor], expected: Sequence[torch.Tensor | None]
) -> Callable[[tuple[torch.Tensor, ...]], bool]:
    """A function that tells whether each of the parameters, given as a tuple, has the very `.grad` that is expected.

    How it looks is not compared. Its caller keeps what is expected alive.
    """
    tree = torch_internals.RootGuardManager()
    _add_gradients(tree, parameters, expected)
    check: Callable[[tuple[torch.Tensor, ...]], bool] = tree.check
    return check


def _add_gradients(node: Any, parameters: Sequence[torch.Tensor], expected: Sequence[torch.Tensor | None]) -> None:
    kind = torch_internals.GuardManagerType.GUARD_MANAGER
    for index, (parameter, gradient) in enumerate(zip(parameters, expected, strict=True)):
        name = f"parameter {index}"
        _add_gradient(node.tuple_getitem_manager(index, name, parameter, kind), name, gradient)


def _add_gradient(node: Any, name: str, gradient: torch.Tensor | None) -> Any:
    """Add a guard of the `.grad` of the parameter that the node stands for. Returns the node of the gradient."""
    kind = torch_internals.GuardManagerType.GUARD_MANAGER
    found = node.grad_manager(f"{name}.grad", gradient, kind)
    found.add_id_match_guard(id(gradient), (name,), None)
    return found


@dataclass(frozen=True, slots=True)
class Held:
    """What stands in a dict under keys, in a list, or in a closure cell (under any key); or an empty set.

    `size` is how many there are, None where that does not matter. `attributes`: the entries are attributes of `holder`,
    an object with slots or a class. `absent` are keys that a dict does not have. `looks` are tensors under keys where
    any may stand that looks like this one.
    """

    holder: Any
    entries: tuple[tuple[Any, Any], ...]
    size: int | None
    attributes: bool = False
    absent: frozenset[str] = frozenset()
    looks: tuple[tuple[Any, torch.Tensor], ...] = ()


def can_be_asked(holder: Any, entries: Sequence[tuple[Any, Any]], *, sized: bool = False) -> bool:
    """Whether C++ reads the holder as Python does. `sized`: how many there are is compared, too."""
    if type(holder) in _DICTS:  # C++ compares the keys, which tensors do element by element
        return _by_name(entries) or (sized and _are_all(holder, entries))
    if is_empty_set(holder):
        return sized
    empty = any(value is holder for _, value in entries)  # what stands for the content of an empty cell
    return type(holder) in (list, types.CellType) and not empty


def is_empty_set(holder: Any) -> bool:
    """Whether all that is to know of it is how many it holds: none. That of a dataclass's `__repr__` is one."""
    return type(holder) is set and not holder


def _by_name(entries: Sequence[tuple[Any, Any]]) -> bool:
    return all(type(key) is str for key, _ in entries)


def _are_all(holder: Any, entries: Sequence[tuple[Any, Any]]) -> bool:
    """Whether these are all the entries of a dict, in its order: then C++ may ask whether it was written at all."""
    return len(holder) == len(entries) and all(
        there is key for there, (key, _) in zip(dict.__iter__(holder), entries, strict=True)
    )


def same_values(held: Sequence[Held]) -> Callable[[], bool]:
    """A function that tells whether the very same objects stand there. It keeps them alive.

    Of a dict with other keys than strings it tells whether nothing was written into it, so that its size costs nothing.
    """
    tree = torch_internals.RootGuardManager()
    kept = tuple(held)
    root = _add_values(tree, kept, _LookedAt((), (), ()))
    check = tree.check

    def same() -> bool:
        return bool(check(root)) if kept else True

    return same


class _LookedAt:
    """Tensors whose looks are compared, and parameters whose `.grad` is: at a node that C++ comes by anyway.

    A `.grad` is compared by what it is and how it looks: `t_()`, `requires_grad_()` and `.data =` leave it the same
    object. An optimizer's list of parameters is one of those nodes. What is read of a tensor is then read once, and
    lies in caches.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        expected: Sequence[torch.Tensor | None],
    ) -> None:
        self._tensors = {id(tensor): tensor for tensor in tensors}
        self._gradients = {id(one): (one, gradient) for one, gradient in zip(parameters, expected, strict=True)}

    def add(self, node: Any, value: Any) -> None:
        """Add guards to the node of a value, if it is one of these and has none yet."""
        if (tensor := self._tensors.pop(id(value), None)) is not None:
            compare_metadata(node, "tensor", tensor)
        if (found := self._gradients.pop(id(value), None)) is not None:
            gradient = found[1]
            leaf = _add_gradient(node, "parameter", gradient)
            if gradient is not None and gradient.layout is torch.strided and not gradient.is_nested:
                compare_metadata(leaf, "gradient", gradient)

    def has(self, value: Any) -> bool:
        """Whether a value is one of these, and has no guards yet."""
        return id(value) in self._tensors or id(value) in self._gradients

    def left(self) -> tuple[torch.Tensor, ...]:
        """Those for which no node was found so far."""
        parameters = {key: parameter for key, (parameter, _) in self._gradients.items()}
        return tuple((self._tensors | parameters).values())


def _add_values(tree: Any, held: Sequence[Held], looked_at: _LookedAt) -> tuple[Any, ...]:
    """Add guards to a node that stands for a tuple of the holders, which is returned.

    What is `looked_at` and stands there is looked at there, once it is known to be the very object.
    """
    kind = torch_internals.GuardManagerType.GUARD_MANAGER
    for index, one in enumerate(held):
        name = f"held {index}"
        is_dict = type(one.holder) in _DICTS and not one.attributes
        if is_dict and not _by_name(one.entries):  # all of its entries: see `can_be_asked`
            node = tree.tuple_getitem_manager(index, name, one.holder, kind)
            node.add_dict_version_guard(one.holder, (name,), None)
            continue
        node = tree.tuple_getitem_manager(index, name, one.holder, kind)
        if one.size is not None:
            (node.add_dict_length_check_guard if is_dict else node.add_length_check_guard)(one.size, (name,), None)
        add_absent(node, name, one.holder, one.entries, one.absent)
        for key, value in one.entries:
            leaf = _place(node, one, key, name, _CHANGES_ITSELF if looked_at.has(value) else value)
            leaf.add_id_match_guard(id(value), (name,), None)
            looked_at.add(leaf, value)
        for key, tensor in one.looks:
            compare_metadata(_place(node, one, key, name, _CHANGES_ITSELF), name, tensor)
    return tuple(one.holder for one in held)


_CHANGES_ITSELF = object()
"""Given for a value that may change though it stays where it is.

C++ does not look at a value in a dict that was not written since if it takes the value for one that cannot change. It
takes tensors for such.
"""


def _place(node: Any, held: Held, key: Any, name: str, value: Any) -> Any:
    """The node of what stands under a key of a holder, whose node is given."""
    kind = torch_internals.GuardManagerType.GUARD_MANAGER
    if held.attributes:
        return node.getattr_manager(key, name, value, kind)
    if type(held.holder) in _DICTS:
        return node.dict_getitem_manager(key, name, value, kind)
    if type(held.holder) is list:
        return node.list_getitem_manager(key, name, value, kind)
    return node.getattr_manager("cell_contents", name, value, kind)


def _add_settings(node: Any, settings: Sequence[Callable[[], Any]]) -> None:
    kind = torch_internals.GuardManagerType.GUARD_MANAGER
    for index, ask in enumerate(settings):
        name, value = f"setting {index}", ask()
        asked = node.tuple_getitem_manager(index, name, ask, kind).call_function_no_args_manager(name, value, kind)
        if isinstance(value, bool):
            asked.add_id_match_guard(id(value), (name,), None)
        else:
            asked.add_equals_match_guard(value, (name,), None)


Found = tuple[tuple[Any, ...], Any]
"""The arguments of a call, and the second value that `same_call` returned."""


def same_call(
    inputs: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    held: Sequence[Held],
    entries: Sequence[HeldEntries],
    parameters: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor | None],
    *,
    unread: Sequence[Held] = (),
    settings: Sequence[Callable[[], Any]] = (),
    distinct: bool,
    no_modes: bool,
    read_apart: TensorWords | None = None,
    of_each_kind: Sequence[torch.Tensor] = (),
    told_apart: CompiledEntries | None = None,
) -> tuple[Callable[[Found], bool], Any]:
    """All that the functions above compare, as one comparison, with the settings as they are now.

    If a tensor is among what is compared, so are inference mode and whatever sees or transforms operators (dispatch
    modes, functorch's transforms): they change the keys that its operators go through.

    Args:
        inputs: what the tensors of a call look like; they are not kept.
        tensors, held, parameters, expected: as above.
        entries: of dicts, compared by their versions as long as nothing was written into these (`dict_guard`).
        unread: where tensors stand of which only `looks` are compared; these are not kept.
        settings: functions that tell more of these, each a bool or a text.
        distinct: whether no tensor stands in `inputs` twice.
        no_modes: whether no modes are active that functions of PyTorch go through.
        read_apart: what is compared in another way, and left out here: of its tensors only one of each kind is looked
            at, for what a thread's settings change.
        of_each_kind: more tensors, one for each set of dispatch keys of what is read apart elsewhere.
        told_apart: tells of `entries`, and of some of `held`, which are left out here.

    Returns:
        A function of the tensors of a call, as a tuple, and of the second value, which keeps what is compared alive.
    """
    tree = torch_internals.RootGuardManager()
    kind = torch_internals.GuardManagerType.GUARD_MANAGER
    tree.add_global_state_guard(torch_internals.GlobalStateGuard(), ("settings",), None)
    if no_modes:
        tree.add_torch_function_mode_stack_guard([], ("modes",), None)
    given = tuple(inputs)
    arguments = tree.tuple_getitem_manager(0, "arguments", given, kind)
    arguments.add_length_check_guard(len(given), ("length",), None)
    nodes = compare_metadata_of_each(arguments, given)
    if distinct and len(nodes) > 1:
        names = [f"tensor {index}" for index in range(len(nodes))]
        torch_internals.no_tensor_aliasing(nodes, names, ("aliases",), None)
    kept = *held, *tensors, *parameters, *expected, *entries
    if told_apart:
        held, entries = [one for one in held if not told_apart.tells_of(one)], ()
    if read_apart is not None:
        tensors = [*read_apart.one_of_each_kind(), *(one for one in tensors if not read_apart.tells_of(one))]
        both = [
            (one, gradient)
            for one, gradient in zip(parameters, expected, strict=True)
            if not read_apart.tells_of_gradient(one)
        ]
        parameters, expected = [one for one, _ in both], [gradient for _, gradient in both]
    tensors = [*tensors, *of_each_kind]
    others = tree.tuple_getitem_manager(1, "the rest", (), kind)
    _add_settings(others.tuple_getitem_manager(0, "more settings", settings, kind), settings)
    looked_at = _LookedAt(tensors, parameters, expected)
    holders = _add_values(others.tuple_getitem_manager(1, "holders", (), kind), [*held, *unread], looked_at)
    left = looked_at.left()
    apart = others.tuple_getitem_manager(2, "tensors", left, kind)
    for index, tensor in enumerate(left):
        looked_at.add(apart.tuple_getitem_manager(index, f"tensor {index}", tensor, kind), tensor)
    rest = [tuple(settings), holders, left, kept]
    if entries:
        rest.append(add_entries(others, len(rest), entries))
    check: Callable[[Found], bool] = tree.check
    return check, tuple(rest)
