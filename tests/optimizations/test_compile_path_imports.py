"""torch.compile's path loads nothing of graph_step."""

from __future__ import annotations

import subprocess
import sys

OF_STEPS = frozenset(("watch", "reference_counts"))
"""Modules that only graph_step and graph_callables use."""

PROGRAM = """
import sys
import torch
import optimizations.compiled_graph
import optimizations.trees.maker

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
compiled = torch.compile(model, backend="encore")
for _ in range(6):
    compiled(torch.ones(2, 4)).sum().backward()
with torch.no_grad():
    for _ in range(6):
        compiled(torch.ones(2, 4))
print(*(name for name in sys.modules if name.startswith("optimizations.")))
"""


def test_compile_path_loads_nothing_of_steps() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    loaded = {part for name in ran.stdout.split() for part in name.split(".")}
    assert {"identity_guard", "tensor_guard", "fast_path"} <= loaded
    assert not loaded & OF_STEPS
