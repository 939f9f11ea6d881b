"""Find out which classes and files are the program's own code, and which names code uses."""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ENCORE = str(Path(__file__).resolve().parents[2])
"""The folder of Encore's code."""
_PYTHONS = {sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
_LIBRARIES = (*_PYTHONS, str(Path(torch.__file__).parent), ENCORE, "<frozen")
_STEPS = "optimizations.capture.step."


def with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those of the functions and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from with_inner(constant)


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in code and in its nested functions."""
    return frozenset(name for one in with_inner(code) for name in one.co_names)


@functools.lru_cache(maxsize=65536)
def all_names(code: types.CodeType) -> frozenset[str]:
    """Return every name in code: of globals, attributes and variables, and strings that may be keys."""
    texts = (constant for constant in code.co_consts if isinstance(constant, str))
    return frozenset((*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars, *texts))


def functions_of(kind: type) -> Iterator[types.FunctionType]:
    """Yield the methods and properties of the program's own classes among the bases of `kind`."""
    for base in kind.__mro__:
        if is_users(base.__module__):
            for name, member in list(vars(base).items()):
                code = _code_of(member)
                if name not in _NOT_IN_A_STEP and isinstance(code, types.FunctionType):
                    yield code


_NOT_IN_A_STEP = frozenset(
    {
        *("__init__", "__new__", "__post_init__", "__init_subclass__", "__del__", "__repr__", "__str__"),
        *("__copy__", "__deepcopy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__"),
    }
)
"""Methods that run when an object is made, printed or copied."""


def _code_of(member: Any) -> Any:
    """Return the function that runs when a member of a class is read or called."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, functools.cached_property):
        return member.func
    return unwrap_step(getattr(member, "__func__", member))


def unwrap_step(value: Any) -> Any:
    """Return the function that was passed to `graph_step` if this is a graphed step, else the value itself."""
    while str(type(value).__module__).startswith(_STEPS) and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value


def slots(kind: type) -> set[str]:
    """Return the names of the slots of a class's instances, private ones as Python writes them."""
    of_slots = (vars(base).items() for base in kind.__mro__ if "__slots__" in vars(base))
    return {name for items in of_slots for name, member in items if isinstance(member, types.MemberDescriptorType)}


def class_values(kind: type) -> set[str]:
    """Return the names of values, not methods, that the program's own classes among `kind` and its bases define."""
    found = (item for base in kind.__mro__ if is_users(base.__module__) for item in list(vars(base).items()))
    return {name for name, member in found if not name.startswith("__") and not hasattr(member, "__get__")}


@functools.lru_cache(maxsize=4096)
def is_users(module: Any) -> bool:
    """Return whether a module is part of the program, and not of Python or an installed library.

    A class may have anything for its `__module__`: for a compiled class it is a descriptor.
    """
    if not isinstance(module, str):
        return False
    root = module.split(".")[0]
    if root in ("torch", "optimizations", "numpy") or (root in sys.stdlib_module_names and root != "__main__"):
        return False
    path = getattr(sys.modules.get(module), "__file__", None)
    return path is None or is_users_file(path)


@functools.lru_cache(maxsize=65536)
def is_users_file(path: str) -> bool:
    """Return whether a file holds the program's own code, and not Python's, Encore's or an installed library's."""
    return not path.startswith(_LIBRARIES) and "-packages/" not in path


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return an object's `__dict__` without calling a `__getattr__`, which may raise anything; None if it has none."""
    try:
        found: Any = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if isinstance(found, dict) else None
