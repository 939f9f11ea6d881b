"""The databases of operators, modules and optimizers that PyTorch's wheel has for its own tests."""

from __future__ import annotations

import functools
import importlib.util
import random
import sys
import types
import unittest
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

DATABASES = ("op_db", "module_db", "optim_db", "hop_db", "custom_op_db")
"""The databases, in the order in which they are run."""

OTHER_DTYPES = (
    *(torch.int64, torch.complex64, torch.bool, torch.int32, torch.uint8, torch.float64, torch.float16),
    *(torch.bfloat16, torch.float8_e4m3fn),
)
"""For an operator without float32, the first of these that it has."""

RANKS = (
    ("function", "main", 0),
    ("opcheck", "main", 0),
    ("function", "complex64", 0),
    ("inplace", "main", 0),
    ("function", "bfloat16", 0),
    ("out", "main", 0),
    ("function", "main", 1),
    ("function", "main", 2),
    ("function", "main", 3),
    ("inplace", "main", 1),
    ("out", "main", 1),
)
"""Variant, dtype and number of an operator's samples, in the order in which they are run."""


@dataclass(frozen=True)
class Task:
    """One sample of an entry of a database. `variant`: "function", "inplace", "out"; of custom operators "opcheck"."""

    database: str
    name: str
    variant: str
    dtype: str
    number: int

    @property
    def key(self) -> str:
        return "|".join((self.database, self.name, self.variant, self.dtype, str(self.number)))

    @staticmethod
    def parse(key: str) -> Task:
        database, name, variant, dtype, number = key.split("|")
        return Task(database, name, variant, dtype, int(number))


def tasks(databases: Sequence[str], device_type: str) -> list[Task]:
    """Return all samples: one of every entry first, then a second one, and so on, each time in a shuffled order."""
    found: list[Task] = []
    for rank, (variant, dtype, number) in enumerate(RANKS):
        row = [
            Task(database, name, variant, chosen, number)
            for database in databases
            for name, entry in entries(database).items()
            if (chosen := _dtype(database, entry, variant, dtype, device_type)) is not None
        ]
        random.Random(rank).shuffle(row)
        found += row
    return list(dict.fromkeys(found))


@functools.cache
def entries(database: str) -> Mapping[str, Any]:
    """Return the entries of a database by name."""
    _replace_expecttest()
    if database == "op_db":
        from torch.testing._internal.common_methods_invocations import op_db as listed
    elif database == "module_db":
        from torch.testing._internal.common_modules import module_db as listed
    elif database == "optim_db":
        from torch.testing._internal.common_optimizers import optim_db as listed
    elif database == "hop_db":
        from torch.testing._internal.hop_db import hop_db as listed
    elif database == "custom_op_db":
        from torch.testing._internal.custom_op_db import custom_op_db as listed
    else:
        raise ValueError(f"unknown database {database!r}; there are {', '.join(DATABASES)}")
    found: dict[str, Any] = {}
    for entry in listed:
        name = _name(database, entry)
        same = sum(other == name or other.startswith(f"{name}#") for other in found)
        found[f"{name}#{same + 1}" if same else name] = entry
    return found


def _name(database: str, entry: Any) -> str:
    if database == "optim_db":
        return str(entry.optim_cls.__name__)
    return str(entry.name if database == "module_db" else entry.full_name)


def _dtype(database: str, entry: Any, variant: str, dtype: str, device_type: str) -> str | None:
    """Return the name of the dtype that is meant; None if the entry has no such sample."""
    if variant == "opcheck" and database != "custom_op_db":
        return None
    if database == "optim_db":
        return "float32" if variant == "function" and dtype == "main" else None
    if database == "module_db":
        has = set(entry.dtypes)
        if variant != "function":
            return None
    else:
        has = set(entry.supported_dtypes(device_type))
        if (variant == "inplace" and entry.get_inplace() is None) or (variant == "out" and not entry.supports_out):
            return None
    if dtype != "main":
        return dtype if getattr(torch, dtype) in has and torch.float32 in has else None
    chosen = next((one for one in (torch.float32, *OTHER_DTYPES) if one in has), None)
    return str(chosen).removeprefix("torch.") if chosen else None


def tolerances(entry: Any, dtype: torch.dtype, device_type: str) -> tuple[float | None, float | None]:
    """Return the largest `rtol` and `atol` that the entry's own tests allow; None stands for the dtype's default."""
    from torch.testing._internal.common_device_type import toleranceOverride

    found = [
        decorator.d[dtype]
        for info in getattr(entry, "decorators", None) or ()
        for decorator in getattr(info, "decorators", ())
        if isinstance(decorator, toleranceOverride)
        and dtype in decorator.d
        and getattr(info, "device_type", None) in (None, device_type)
    ]
    if not found:
        return None, None
    return max(one.rtol for one in found), max(one.atol for one in found)


def _replace_expecttest() -> None:
    """Stand in for the package `expecttest`, whose `TestCase` PyTorch's modules import and the databases do not use."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        stand_in.ACCEPT = False  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
