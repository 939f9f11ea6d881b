"""Garbage is not collected while a graph is captured, and again afterwards."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
from interrupts import interrupted_after

from optimizations.uncollected import uncollected


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    before = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if before else gc.disable)()


def test_garbage_is_not_collected_until_the_last_block_ends() -> None:
    """Blocks of two threads may end in any order."""
    one, other = uncollected(), uncollected()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert not gc.isenabled()
    other.__exit__(None, None, None)
    assert gc.isenabled()


def test_block_leaves_collection_off_where_the_program_did() -> None:
    gc.disable()
    with uncollected():
        assert not gc.isenabled()
    assert not gc.isenabled()


@pytest.mark.parametrize("call", range(5))
def test_interrupt_of_a_block_leaves_collection_on(call: int) -> None:
    with interrupted_after(call, "/uncollected.py") as where, contextlib.suppress(KeyboardInterrupt), uncollected():
        pass
    assert where
    assert gc.isenabled()
