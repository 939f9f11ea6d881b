"""torch.compile's path loads nothing of graph_step, and neither needs a PyTorch that was built with CUDA."""

from __future__ import annotations

import subprocess
import sys

OF_STEPS = frozenset(("watch", "gradients"))
"""Modules that only graph_step and graph_callables use."""

PROGRAM = """
import sys
import torch
import optimizations.compiled_graph
import optimizations.trees.graphed_function

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
    assert {"identity_guard", "geometry", "fast_path"} <= loaded
    assert not loaded & OF_STEPS


WITHOUT_CUDA = """
import warnings
import torch
del torch._C._tensors_data_ptrs_at_indices_equal  # which a wheel for CPUs alone does not have
import encore

torch._inductor.config.fallback_by_default = True  # nothing is compiled by a C++ compiler
model = torch.nn.Linear(4, 4)
compiled = torch.compile(model, backend="encore")
step = encore.graph_step(lambda x: model(x).sum())
(part,) = encore.graph_callables([model])
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    for number in range(4):
        x = torch.randn(2, 4)
        for found in (compiled(x), part(x)):
            assert torch.allclose(found, model(x)), number
        step(x).backward()
assert not [one for one in warned if "not supported" in str(one.message) or "has no" in str(one.message)]
assert [one.reason for one in step.report().refusals] == ["works on no tensor of a GPU"]
encore.reset()
"""


def test_pytorch_without_cuda_runs_programs_as_they_are() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT_CUDA], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
