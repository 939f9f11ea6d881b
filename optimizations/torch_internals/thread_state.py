"""Keep objects in PyTorch's thread-local state, and run internal operators apart from what a program has there.

Autograd copies that state to the threads that run a thread's backward.

Note [A reference for the thread-local state]. `torch._C._stash_obj_in_tls` takes an object over without counting a
reference, and drops one when the thread ends. So one is counted here, or the object would die under those who use it.

Note [Threads that end with the interpreter]. That reference is dropped when the thread has ended for Python, and is
about to end for the system: it takes the interpreter's lock once more. Where the interpreter begins to end at that
moment, as it does when a pool of threads was its last work, it never gets the lock, and the whole process is aborted.
So the exit of the interpreter waits until such threads are gone, which takes milliseconds.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from optimizations import torch_internals

T = TypeVar("T")

LONGEST_WAIT_S = 2.0
"""How long the exit of the interpreter waits at most for threads that have ended."""

_TASKS = Path("/proc/self/task")
_keepers: set[int] = set()
"""Threads of this process that keep something, as the system numbers them; some may be gone."""


def find(key: str) -> Any:
    """Return what this thread, or the one whose backward this thread runs, keeps under a name; else None."""
    return torch_internals.get_obj_in_tls(key) if torch_internals.is_key_in_tls(key) else None


def keep(key: str, value: Any) -> None:
    """Keep an object for this thread, in place of an earlier one."""
    _keepers.add(threading.get_native_id())
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch_internals.stash_obj_in_tls(key, value)


def wait_for_ended_threads() -> None:
    """See Note [Threads that end with the interpreter]."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    running = {thread.native_id for thread in threading.enumerate()}
    for one in _keepers - running:
        while _is_there(one) and time.monotonic() < deadline:
            time.sleep(0.001)  # it gets the lock meanwhile


def _is_there(thread: int) -> bool:
    return (_TASKS / str(thread)).exists()


def apart_from_the_program(do: Callable[[], T]) -> T:
    """Call `do` without the program's modes, transforms and inference mode, and outside of other operators.

    No mode sees its operators. Leaving inference mode brings back autograd also where an operator's kernel is without.
    Hooks of saved tensors stay: what autograd would save belongs into `in_a_new_thread`.

    Note [Guards and interrupts]. Settings of a thread are switched by guards in C that stand in a `with` statement
    themselves, or in a `try` whose `finally` puts them back. A signal is handled after a call and when a function of
    Python begins. So `with torch.inference_mode(False)` may end between the guard, which is in an attribute of the
    context manager then, and the block. The guard is left when the traceback goes, whenever that is, and puts back what
    was there before: gradients are off from then on if the interrupted call was inside of autograd.
    """
    with torch_internals.disable_torch_function(), torch_internals.InferenceMode(False):
        if not torch_internals.len_torch_dispatch_stack() and not torch_internals.are_functorch_transforms_active():
            return do()
        with torch_internals.clear_functorch_levels(), torch_internals.disable_current_modes():
            return do()


def in_a_new_thread(probe: Callable[[], T]) -> T:
    """Call a probe without any of the program's thread-local settings, and return its result.

    Modes, hooks of saved tensors, grad mode and autocast belong to a thread. A tensor that a probe has autograd save
    would otherwise reach the program's hooks: activation checkpointing counts the tensors that it is given, and raises
    where a forward and its recomputation differ.
    """
    with ThreadPoolExecutor(max_workers=1) as threads:
        return threads.submit(probe).result()


atexit.register(wait_for_ended_threads)
os.register_at_fork(after_in_child=_keepers.clear)  # the child has none of them
