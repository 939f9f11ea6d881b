"""torch.compile's path reads tensors and dictionaries through functions that Python or PyTorch exports."""

from __future__ import annotations

import subprocess
import sys

READ_AT_OFFSETS = frozenset(
    (
        "argument_guard",
        "argument_words",
        "compiled_entries",
        "dict_guard",
        "entry_words",
        "host_code",
        "memory_words",
        "reference_counts",
        "tensor_words",
        "versions",
    )
)
"""Modules that read memory at offsets, or are for those that do; only graph_step and graph_callables use them."""

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


def test_compile_path_loads_no_module_that_reads_offsets() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    loaded = {part for name in ran.stdout.split() for part in name.split(".")}
    assert {"identity_guard", "tensor_guard", "fast_path"} <= loaded
    assert not loaded & READ_AT_OFFSETS
