"""Whose an attribute is, where that can be told without running anything: the program's own, or a library's."""

from __future__ import annotations

import collections
import sys
import types
from collections.abc import Collection
from typing import Any

import torch

from optimizations.capture.step.host_state import KEPT_BY_MODULES
from optimizations.capture.step.program_code import attributes_of, is_users

UNKNOWN: Any = object()
MOST_HELD = 10_000
"""Objects in a library's object that are looked through for some of the program's own."""
_PLAIN = (int, float, complex, str, bytes, type(None), torch.Tensor, torch.dtype, torch.device)
_OF_LOOPS = ("torch.optim", "torch.nn", "torch.amp", "torch.cuda.amp")
"""Modules of PyTorch whose objects are what a training loop holds."""
_OTHERS = (*sys.stdlib_module_names, "numpy", "triton", "optimizations")
"""Packages of whose objects not all attributes are watched."""

_USUAL_LOOKUPS = (object.__getattribute__, types.SimpleNamespace.__getattribute__)


def attribute_of(owner: Any, name: str, stored: Collection[str]) -> Any:
    """The attribute of an object, if it stands there and no code of a class decides; `UNKNOWN` else.

    `stored`: names that the step writes.
    """
    if name in stored:
        return UNKNOWN
    if isinstance(owner, types.ModuleType):
        found = vars(owner).get(name, UNKNOWN)
        # Variables of libraries' modules are not watched.
        fixed = is_users(owner.__name__) or isinstance(found, (types.ModuleType, type))
        return found if fixed else UNKNOWN
    kind = type(owner)
    of_class = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    if _has_own_lookup(kind) or hasattr(type(of_class), "__set__") or hasattr(type(of_class), "__delete__"):
        return UNKNOWN
    held = attributes_of(owner)
    if not isinstance(held, dict):
        return UNKNOWN
    if name not in held and of_class is None and isinstance(owner, torch.nn.Module):
        held = next((kept for kept in map(held.get, KEPT_BY_MODULES) if kept and name in kept), {})
    return held.get(name, UNKNOWN)


def only_librarys(owner: Any, name: str) -> bool:
    """Whether an attribute's name is that of a library's object, and means none of the program's own objects.

    A library's object that holds such may look up the same name of them. Where these have a base of a library, their
    methods count all the same.
    """
    if isinstance(owner, types.ModuleType):
        return not is_users(owner.__name__)
    kind = type(owner)
    if isinstance(owner, torch.nn.Module):
        own = [base for base in kind.__mro__ if is_users(base.__module__)]
        if name in vars(owner) or any(name in vars(base) for base in own):
            return False
        if own and not (name in vars(torch.nn.Module) and all(map(_is_own_or_module, kind.__mro__))):
            return False
        return not _has_own_lookup(kind) and (
            bool(own) or kind.__module__.startswith("torch.") or not _holds_own(owner)
        )
    if any(is_users(base.__module__) for base in kind.__mro__) or _has_own_lookup(kind):
        return False
    if isinstance(owner, (torch.Tensor, dict, list, tuple, set, type)) or attributes_of(owner) is None:
        return False
    package = kind.__module__.split(".")[0]
    if package in _OTHERS or (package == "torch" and not kind.__module__.startswith(_OF_LOOPS)):
        return False
    return not _holds_own(owner)


def is_librarys(value: Any) -> bool:
    """Whether a library's code may be given it, and finds nothing of the program's own but modules."""
    if isinstance(value, _PLAIN):
        return True
    return isinstance(value, torch.optim.Optimizer) and only_librarys(value, "step")


def _is_own_or_module(kind: type) -> bool:
    return kind in (object, torch.nn.Module) or is_users(kind.__module__)


def _has_own_lookup(kind: type) -> bool:
    """Whether code of a class decides what its objects have."""
    if kind.__getattribute__ not in _USUAL_LOOKUPS:
        return True
    return any("__getattr__" in vars(base) for base in kind.__mro__ if base is not torch.nn.Module)


def _holds_own(owner: Any) -> bool:
    """Whether a library's object holds objects of the program's own classes, other than modules and functions."""
    waiting: collections.deque[Any] = collections.deque(vars(owner).values())
    seen = {id(owner)}
    while waiting:
        value = waiting.popleft()
        if id(value) in seen or isinstance(value, _PLAIN):
            continue
        seen.add(id(value))
        if len(seen) > MOST_HELD:
            return True
        kind = type(value)
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            waiting.extend(value)
        elif isinstance(value, types.MethodType):
            waiting.append(value.__self__)
        elif isinstance(value, (types.FunctionType, type, types.ModuleType, torch.nn.Module)):
            continue
        elif is_users(kind.__module__) or kind.__module__ in ("types", "argparse"):
            return True
        elif isinstance(held := attributes_of(value), dict):
            waiting.extend(held.values())
    return False
