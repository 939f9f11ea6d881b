"""The same code with other globals, and a refusal where the code is not what it was."""

from __future__ import annotations

import pytest

from optimizations import torch_internals
from optimizations.torch_internals import UnsupportedTorch
from optimizations.torch_internals.rebind import with_globals

factor = 2


def scaled(value: int, *, offset: int = 1) -> int:
    """Reads a global."""
    return factor * value + offset


def test_the_function_reads_the_new_object_and_stock_the_old() -> None:
    bound = with_globals(scaled, factor=10)
    assert (bound(3), scaled(3)) == (31, 7)
    assert bound(3, offset=0) == 30
    assert (bound.__name__, bound.__doc__) == (scaled.__name__, scaled.__doc__)


def test_a_global_that_is_not_read_is_refused() -> None:
    with pytest.raises(UnsupportedTorch, match=r"scaled does not read quotient"):
        with_globals(scaled, quotient=3)


def test_what_is_no_python_function_is_refused() -> None:
    with pytest.raises(UnsupportedTorch, match="not a plain Python function"):
        with_globals(len, factor=1)


def test_rebound_stock_methods_read_the_new_globals() -> None:
    manager = torch_internals.cudagraph_trees.CUDAGraphTreeManager
    assert with_globals(manager.record_function, CUDAGraphNode=object)
    assert with_globals(manager.add_function, get_container=object)
    assert with_globals(torch_internals.cudagraph_trees.cudagraphify, get_container=object)
