"""Manage locks, contexts and streams of the threads that call functions of a manager.

Note [Backwards inside of functions]. Functions of one manager run one at a time: the caller holds a reentrant lock, the
*turn*. A custom operator of the program may run a backward. On a GPU the engine's thread of that GPU would run it, the
same for all threads of the program. It may be waiting for this lock in another thread's backward, and would never come
to the one that the holder waits for. So while operators of the program run under a lock of Encore's, their backwards
run in the thread that holds it (`backwards_here`). In a capture they allocate memory of the graph then.

Note [Order of locks]. A thread that runs a function under its lock waits for no other lock of Encore's, so there is no
deadlock between threads. An operator in that function may call a function of another device, which another thread may
be running: that call runs without a graph. It may call a function with CPU values, whose `Feeds` another thread may
hold while it waits for the manager: that call runs the graph as it was before placement. It may call a function whose
first call another thread is making: that call runs without a graph. So a lock of `Feeds`, and that of a first call, is
always taken before a manager's, and a thread holds at most one manager's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from optimizations import torch_internals
from optimizations.graph.driver import check
from optimizations.torch_internals.gpu_state import is_capturing

T = TypeVar("T")

RUNNING: dict[int, Any] = {}
"""The functions (`trees.function.RecordableFunction`) that threads run under their locks, by thread."""


def run_under(function: Any, inputs: list[Any]) -> Any:
    """Run a function whose manager's lock this thread holds, or that is called inside of another function."""
    thread = threading.get_ident()
    if thread in RUNNING:
        RUNNING[thread].runs_inside(function.direction)
        return function.run(inputs)
    try:  # an interrupt may come right after any call
        RUNNING[thread] = function
        return backwards_here(function.run, inputs)
    finally:
        RUNNING.pop(thread, None)


def backwards_here(run: Callable[..., T], *arguments: Any) -> T:
    """Call `run`. Backwards that operators start in it run in this thread. Note [Backwards inside of functions]."""
    before = torch_internals.is_multithreading_enabled()
    try:
        torch_internals.set_multithreading_enabled(False)
        return run(*arguments)
    finally:
        torch_internals.set_multithreading_enabled(before)


def inside_another(turn: Any) -> bool:
    """Return whether this thread runs a function under another lock, so that it must not wait for this one."""
    running = RUNNING.get(threading.get_ident())
    return running is not None and running.turn is not turn


def inside_a_function() -> bool:
    """Return whether this thread runs a function under its manager's lock."""
    return threading.get_ident() in RUNNING


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
