"""Manage locks, contexts and streams of the threads that call functions of a manager.

Note [Backwards inside of functions]. Functions of one manager run one at a time: the caller holds a reentrant lock, the
*turn*. A custom operator of the program may run a backward of another compiled function. On a GPU an autograd thread
runs that backward while the caller waits for it and holds the lock, which would be a deadlock. So the thread that runs
a function lends its lock to the threads that run its backwards. They find this in PyTorch's thread-local state, which
the autograd engine copies to them and to no other thread.

Note [Order of locks]. A thread that runs a function under its lock waits for no other lock of Encore's, so there is no
deadlock between threads. An operator in that function may call a function of another manager, which another thread may
be running: that call runs without a graph. It may call a function with CPU values, whose `Feeds` another thread may
hold while it waits for the manager: that call runs the graph as it was before placement. It may call a function whose
first call another thread is making: that call runs without a graph. So a lock of `Feeds`, and that of a first call, is
always taken before a manager's, and a thread holds at most one manager's lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from optimizations.graph.driver import check
from optimizations.torch_internals import thread_state
from optimizations.torch_internals.gpu_state import is_capturing

_TLS_KEY = "encore_lent_turns"


class Lent:
    """Hold a lock that a thread lends while it runs a function. `before`: the lock that it borrowed or lent before."""

    __slots__ = ("before", "thread", "turn")

    def __init__(self, turn: Any, before: Lent | None) -> None:
        self.turn = turn
        self.thread = threading.get_ident()
        self.before = before


LENT: set[Lent] = set()
"""The locks that are lent now, in all threads."""


@contextlib.contextmanager
def lending(turn: Any) -> Iterator[None]:
    """Lend this lock to the threads that run backwards, while the block runs a function under it."""
    before: Lent | None = thread_state.find(_TLS_KEY)
    made = Lent(turn, before)
    try:  # an interrupt may come right after any call
        LENT.add(made)
        thread_state.keep(_TLS_KEY, made)
        yield
    finally:
        LENT.discard(made)
        thread_state.keep(_TLS_KEY, before)


def is_lent(turn: Any) -> bool:
    """Return whether this thread must not wait for a lock. See the module's Notes."""
    thread = threading.get_ident()
    return any(one.turn is not turn or one.thread != thread for one in _around())


def inside_a_function() -> bool:
    """Return whether this thread, or one that waits for it, runs a function under its manager's lock."""
    return any(True for _ in _around())


def _around() -> Iterator[Lent]:
    one: Lent | None = thread_state.find(_TLS_KEY) if LENT else None
    while one is not None:
        if one in LENT:
            yield one
        one = one.before


def make_context_current(device_index: int) -> None:
    """Set the device's context in this thread if it has none: driver calls need one, and PyTorch sets it late.

    Raises:
        CudaCallFailed: the driver refuses.
    """
    try:
        from cuda.bindings import driver
    except ImportError:  # then there are no driver calls either
        return
    if int(check(driver.cuCtxGetCurrent)):
        return
    with torch.cuda.device(device_index):
        device = check(driver.cuDeviceGet, device_index)
        check(driver.cuCtxSetCurrent, check(driver.cuDevicePrimaryCtxRetain, device))


def wait_for_stream(raw_stream: int, device_index: int) -> None:
    """Make the current stream of the device wait for everything that is enqueued on another, by its handle.

    Do nothing if one of them is being captured: see `is_capturing`.
    """
    current, other = torch.cuda.current_stream(device_index), stream_of(raw_stream, device_index)
    if not is_capturing(current) and not is_capturing(other):
        current.wait_stream(other)


def stream_of(raw_stream: int, device_index: int) -> torch.cuda.Stream:
    """Return the stream of the device with this handle."""
    if raw_stream:
        return torch.cuda.ExternalStream(raw_stream, device=device_index)
    return torch.cuda.default_stream(device_index)
