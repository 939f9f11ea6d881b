"""Saved-tensor hooks get the program's tensors, equally many on every path of a call."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_gpu.compiler import CompiledOnCpu
from torch import nn
from torch.utils.checkpoint import checkpoint

IMPORTS = """
import importlib, pkgutil, torch
saved = []
with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one), lambda one: one):
    import optimizations
    for found in pkgutil.walk_packages(optimizations.__path__, "optimizations."):
        importlib.import_module(found.name)
print("saved", len(saved))
"""


def test_imports_save_no_tensors() -> None:
    """Encore imports most of its modules in the program's first forward, which may be checkpointed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    arguments = [sys.executable, "-c", IMPORTS]
    result = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout.strip() == "saved 0", result.stderr


class Adapted(nn.Module):
    """A frozen weight with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.tanh(self.base(x) + self.up(self.down(x)))
        return result


@pytest.mark.parametrize("lean", [True, False])
def test_every_path_saves_equally_many_tensors(compiled_on_cpu: CompiledOnCpu, lean: bool) -> None:
    counts = []
    block = Adapted()
    call = torch.compile(block, backend="encore", options={"lean": lean})
    for step in range(12):
        torch.compiler.cudagraph_mark_step_begin()
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one, saved=saved: saved.append(one) or one, _same):
            result = call(torch.randn(4, 8) + step)
        result.square().sum().backward()
        counts.append(len(saved))
    assert len(set(counts)) == 1
    assert compiled_on_cpu.cuda.replays


def _same(value: Any) -> Any:
    return value


def test_checkpointed_blocks_have_eagers_gradients(compiled_on_cpu: CompiledOnCpu) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Adapted() for _ in range(3))

    def gradients(calls: list[Callable[..., Any]], x: torch.Tensor) -> list[torch.Tensor]:
        for call in calls:
            x = checkpoint(call, x, use_reentrant=False)
        x.square().sum().backward()
        found = [one.grad for one in blocks.parameters() if one.grad is not None]
        blocks.zero_grad()
        return found

    compiled = [torch.compile(block, backend="encore") for block in blocks]
    for step in range(12):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(4, 8) + step
        torch.testing.assert_close(gradients(compiled, x), gradients(list(blocks), x))
    assert compiled_on_cpu.cuda.replays
