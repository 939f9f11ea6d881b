"""Run compiled modules inside of a step without their own CUDA graphs while the step is warmed up and captured.

A graph of CUDAGraph Trees cannot be recorded or replayed inside of another capture. Its manager has a way to run a
function without a graph, for functions that mutate their inputs; the same way is taken here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from optimizations import torch_internals
from optimizations.torch_internals import replaced_attribute

at_rest_now = 0
"""How many blocks of `at_rest` are under way."""


def resting() -> bool:
    """Return whether graphs of compiled modules are to run as the functions they were made of."""
    return at_rest_now > 0


@contextlib.contextmanager
def at_rest() -> Iterator[None]:
    """Run compiled modules without CUDA graphs of their own inside the block, in all threads."""
    global at_rest_now
    manager: Any = torch_internals.cudagraph_trees.CUDAGraphTreeManager

    # `_run` is looked up in each call. `run` is not to be replaced: functions compiled inside the block keep it.
    def run(self: Any, new_inputs: list[Any], function_id: Any) -> Any:
        return self.ids_to_funcs[function_id].model(new_inputs)

    at_rest_now += 1
    try:
        with replaced_attribute(manager, "_run", run):
            yield
    finally:
        at_rest_now -= 1
