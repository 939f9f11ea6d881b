"""PyTorch operators replaced by Python functions for a while."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from optimizations import torch_internals


@contextlib.contextmanager
def overridden(dispatch_key: str, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """While the block runs, operators of the `aten` namespace are these functions where `dispatch_key` handles them."""
    with torch_internals.scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Oo]verriding a previously registered kernel.*")
        for operator, function in functions.items():
            library.impl(operator, function, dispatch_key)
        yield
