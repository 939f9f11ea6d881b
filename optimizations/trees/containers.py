"""Keep Encore's managers, one for each device, separate from stock's.

Stock keeps its managers in a dictionary that only the importing thread and its autograd threads can reach. Encore's are
for all threads, whose calls take turns: Note [Threads] in `streams`.

A finalizer may run wherever Python allocates, and may call a compiled function or reset Encore. With a lock it would
wait for its own thread. So there is no lock: the dictionary is used by atomic operations only (`get`, `setdefault`,
`popitem`, `copy`).
"""

from __future__ import annotations

import functools
from typing import Any

from optimizations import torch_internals
from optimizations.weak_registry import WeakRegistry

TreeManagerContainer: Any = torch_internals.cudagraph_trees.TreeManagerContainer

BY_DEVICE: dict[int, Any] = {}
"""The containers of managers (`graphed_function.EncoreContainer`), by CUDA device."""

GRAPHED: WeakRegistry[Any] = WeakRegistry()
"""All `graphed_function.GraphedFunction`s."""


def container_of_call(device_index: int) -> Any:
    """Return the container of a call that records; an empty one if Encore was reset during the call."""
    return BY_DEVICE.get(device_index) or TreeManagerContainer(device_index)


def manager_of(device_index: int) -> Any:
    """Return the live manager (`manager.EncoreManager`) of a CUDA device; None if it has none."""
    container = BY_DEVICE.get(device_index)
    return None if container is None else container.tree_manager


def managers() -> list[Any]:
    """Return the live managers of all CUDA devices."""
    return [found for index in BY_DEVICE.copy() if (found := manager_of(index)) is not None]


def everything() -> list[Any]:
    """Return all live containers, managers and graphs, for a process that must not free them."""
    found = managers()
    return [*BY_DEVICE.copy().values(), *found, *(node for manager in found for node in manager.nodes())]


def settled() -> bool:
    """Return whether no recording has work left that further calls of the program would do, and no race runs."""
    if any(function.is_measured_now for function in GRAPHED.alive()):
        return False
    replays = functools.cache(lambda function: function.replays())
    return not any(
        session is not None and session.pending and not node.function.is_idle(node, replays(node.function))
        for manager in managers()
        for node, session in [(one, one.session) for one in manager.nodes()]  # another thread may release one
    )


def free_all() -> None:
    """Shut every manager down and forget it: graphs, pools and placeholders are freed. Functions record again."""
    while BY_DEVICE:
        try:
            _, container = BY_DEVICE.popitem()
        except KeyError:  # another thread took the last one
            break
        if container.tree_manager is not None:
            container.tree_manager.shutdown()
    for function in GRAPHED.alive():
        function.forget()
