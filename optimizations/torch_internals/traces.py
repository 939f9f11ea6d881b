"""Trace with Dynamo so that nothing is left for later compilations of the same code.

Dynamo counts what it has traced of a piece of code, for any caller: after eight traces it runs the code uncompiled, and
a size that differs from an earlier trace's becomes a symbol.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from types import CodeType

from optimizations import torch_internals


@contextlib.contextmanager
def traces_forgotten() -> Iterator[None]:
    """Make Dynamo forget what it traces inside, and the sizes that it saw.

    Of code that had been compiled before it forgets the sizes only: it can drop all traces of a piece of code, not one.
    """
    compiled = {code for code in _traced() if torch_internals.cache_entries(code)}
    sizes = torch_internals.sizes_seen()
    before = copy.deepcopy(dict(sizes))
    try:
        yield
    finally:
        sizes.clear()
        sizes.update(before)
        for code in _traced():
            if code not in compiled and torch_internals.cache_entries(code):
                torch_internals.reset_code(code)


def _traced() -> list[CodeType]:
    codes = (reference() for reference in torch_internals.input_codes.seen)
    return [code for code in codes if code is not None]
