"""Short programs of many kinds: operators that hold graphs, tensors that are not plain ones, transforms, hooks, modes.

Each runs eager, under stock and under Encore, and notes what it computes. They are the same on the CPU and on a GPU.
"""

import importlib
import pkgutil

from kinds.world import KINDS, Kind, World

__all__ = ["KINDS", "Kind", "World"]

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("test_"):
        importlib.import_module(f"{__name__}.{_module.name}")
