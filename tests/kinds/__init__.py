"""Short programs of many kinds: operators that hold graphs, tensors that are not plain ones, transforms, hooks, modes.

Each runs eager, under stock and under Encore, and notes what it computes. They are the same on the CPU and on a GPU.
"""

from kinds import (
    around,
    autograd,
    between,
    caches,
    callers,
    control_flow,
    device_only,
    function,
    holders,
    lifetimes,
    modes,
    modules,
    outputs,
    outside,
    shapes,
    subclasses,
    weights,
    wrapped,
)
from kinds.world import KINDS, Kind, World

__all__ = [
    "KINDS",
    "Kind",
    "World",
    "around",
    "autograd",
    "between",
    "caches",
    "callers",
    "control_flow",
    "device_only",
    "function",
    "holders",
    "lifetimes",
    "modes",
    "modules",
    "outputs",
    "outside",
    "shapes",
    "subclasses",
    "weights",
    "wrapped",
]
