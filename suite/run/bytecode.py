"""Compiled Python for processes that import torch, where the installation has none.

Images are often built without compiled Python (`pip install --no-compile`, PYTHONDONTWRITEBYTECODE), and folders of
packages may not be written. Each process then compiles 2,700 files of PyTorch's: 8 s of a core, in 40 processes of a
workload and in their compile workers. So they keep what they compile in a folder of their own.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from optimizations.user_cache import user_cache

BYTECODE = "bytecode"
"""The folder's name in the user's cache."""


def bytecode_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What to add to a process's environment. Nothing where torch is compiled already, or the user chose a place."""
    torch = importlib.util.find_spec("torch")  # without importing it
    compiled = torch is not None and torch.cached is not None and Path(torch.cached).exists()
    if compiled or environment.get("PYTHONPYCACHEPREFIX"):
        return {}
    return {"PYTHONPYCACHEPREFIX": str(user_cache() / BYTECODE), "PYTHONDONTWRITEBYTECODE": ""}
