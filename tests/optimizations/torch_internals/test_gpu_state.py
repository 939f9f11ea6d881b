"""Memory queries drop no references of the caller."""

from __future__ import annotations

import json
import subprocess
import sys

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


def test_pool_queries_drop_no_references() -> None:
    """In a process of its own: plain PyTorch 2.11 crashes it at the second question."""
    done = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(lost <= 0 for lost in json.loads(done.stdout)[:2])
