"""Short programs of many kinds: operators that hold graphs, tensors that are not plain ones, transforms, hooks, modes.

Each runs eager, under stock and under Encore, and notes what it computes. They are the same on the CPU and on a GPU.
"""

from kinds import (
    autograd,
    between,
    callers,
    control_flow,
    device_only,
    function,
    lifetimes,
    modes,
    modules,
    outputs,
    outside,
    shapes,
    subclasses,
    wrapped,
)
from kinds.world import KINDS, Kind, World

__all__ = [
    "KINDS",
    "Kind",
    "World",
    "autograd",
    "between",
    "callers",
    "control_flow",
    "device_only",
    "function",
    "lifetimes",
    "modes",
    "modules",
    "outputs",
    "outside",
    "shapes",
    "subclasses",
    "wrapped",
]
