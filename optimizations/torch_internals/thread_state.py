"""Objects in PyTorch's thread-local state, which the autograd engine hands on to the threads that run a thread's
backward.

Note [A reference for the thread-local state]. `torch._C._stash_obj_in_tls` takes an object over without counting a
reference, and drops one when the thread ends. So one is counted here, or the object would die under those who use it.
"""

from __future__ import annotations

import ctypes
from typing import Any

from optimizations import torch_internals


def find(key: str) -> Any:
    """What this thread, or the thread whose backward this one runs, keeps under a name; None where that is nothing."""
    return torch_internals.get_obj_in_tls(key) if torch_internals.is_key_in_tls(key) else None


def keep(key: str, value: Any) -> None:
    """Keep it for this thread, in place of what was there."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch_internals.stash_obj_in_tls(key, value)
