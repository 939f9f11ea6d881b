"""Memory queries do not drop references of the caller."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest
import torch

from optimizations.torch_internals.gpu_state import drops_references

ASKS = """
import sys
from optimizations.torch_internals.gpu_state import memory_segments
pool = int("1000"), int("70000")
before = [sys.getrefcount(one) for one in (*pool, 0, False)]
for _ in range(100):
    assert memory_segments(pool) == []
    memory_segments()
after = [sys.getrefcount(one) for one in (*pool, 0, False)]
print([had - has for had, has in zip(before, after)])
"""


def test_pool_queries_leak_no_references() -> None:
    """In a process of its own: plain PyTorch 2.11 crashes it at the second question."""
    done = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lost = json.loads(done.stdout)
    assert lost[:2] == [0, 0]
    assert all(abs(one) < 20 for one in lost[2:]), "of numbers that all of Python shares"


@pytest.mark.skipif(not hasattr(torch._C, "_cuda_memorySnapshot"), reason="this PyTorch knows nothing of CUDA")
def test_reference_drop_of_this_pytorch_is_detected() -> None:
    number = int("1234567")
    asked = [(number, number, False)] * 4
    before = sys.getrefcount(number)
    torch._C._cuda_memorySnapshot(asked[0])
    dropped = before - sys.getrefcount(number)
    for _ in range(dropped):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    assert drops_references() == (dropped == 2)
