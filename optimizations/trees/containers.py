"""Keep Encore's managers, per thread and device, separate from stock's.

Stock keeps its managers in a dictionary that only the importing thread and its autograd threads can reach. Encore has
one for each thread that compiles, and the functions of a compilation have the managers of its thread: a backward, which
a thread of the autograd engine compiles and runs, those of its forward. What such a thread compiles first by itself, in
a hook for example, has those of the main thread.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from optimizations import torch_internals
from optimizations.weak_registry import WeakRegistry

TreeManagerContainer: Any = torch_internals.cudagraph_trees.TreeManagerContainer


class ThreadContainers:
    """Hold the containers (`graphed_function.EncoreContainer`) of one thread, by device.

    A finalizer may run wherever Python allocates, and may call a compiled function or reset Encore. With a lock it
    would wait for its own thread. So there is no lock: the dictionary is used by atomic operations only (`get`,
    `setdefault`, `popitem`, `copy`).
    """

    def __init__(self) -> None:
        self.by_device: dict[int, Any] = {}


_ALL: WeakRegistry[ThreadContainers] = WeakRegistry()
"""The containers of all threads."""

GRAPHED: WeakRegistry[Any] = WeakRegistry()
"""All `graphed_function.GraphedFunction`s."""


RECORDING = threading.local()
"""Attribute `owner`: the containers with which this thread recorded last."""


def thread_containers() -> ThreadContainers:
    """Return the containers of this thread."""
    thread = threading.current_thread()
    if isinstance(thread, threading._DummyThread):  # the autograd engine's
        thread = threading.main_thread()
    found: ThreadContainers = vars(thread).setdefault("encore_containers", ThreadContainers())
    _ALL.add(found)
    return found


def container_of_call(device_index: int) -> Any:
    """Return the container of a call that records; an empty one if Encore was reset during the call."""
    return RECORDING.owner.by_device.get(device_index) or TreeManagerContainer(device_index)


def managers(device_index: int | None = None, but: ThreadContainers | None = None) -> list[Any]:
    """Return the live managers (`manager.EncoreManager`) of all threads but one, on one CUDA device or on all."""
    return [
        container.tree_manager
        for containers in _ALL.alive()
        if containers is not but
        for index, container in containers.by_device.copy().items()
        if container.tree_manager is not None and device_index in (None, index)
    ]


def everything() -> list[Any]:
    """Return all live containers, managers and graphs, for a process that must not free them."""
    found = managers()
    return [*_ALL.alive(), *found, *(node for manager in found for node in manager.nodes())]


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


def others_have_managers() -> bool:
    """Return whether a thread with other containers has a manager."""
    return bool(managers(but=thread_containers()))


def free_all() -> None:
    """Shut every manager down and forget it: graphs, pools and placeholders are freed. Functions record again."""
    for containers in _ALL.alive():
        while containers.by_device:
            try:
                _, container = containers.by_device.popitem()
            except KeyError:  # another thread took the last one
                break
            if container.tree_manager is not None:
                container.tree_manager.shutdown()
    for function in GRAPHED.alive():
        function.forget()
