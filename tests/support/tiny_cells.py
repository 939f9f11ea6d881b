"""Cells of tiny workloads in this process, on the CPU: the fixture that makes them, and what stands in their modes."""

from __future__ import annotations

import shutil

import pytest
import torch
from tiny_workloads import WholeCell, spec_of, workload_of

import suite.worker.compilation
from models import registry
from optimizations import torch_internals
from suite.worker.compile_cache import JUDGED


@pytest.fixture
def cell(monkeypatch, tmp_path_factory):
    """A function that makes a cell in a mode; its phases are in `.phases`."""
    cache = tmp_path_factory.getbasetemp() / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    cache.mkdir(exist_ok=True)
    shutil.rmtree(cache / JUDGED, ignore_errors=True)
    mark = torch_internals.inductor_config.aot_inductor.metadata
    precision = torch.get_float32_matmul_precision()

    def make(build, mode="eager", *, spec=(), **fields) -> WholeCell:
        """The cell of the module that `build()` makes, or of the workload that has this name."""
        if not isinstance(build, str):
            registry.workloads()  # or finding this one would add all others, in the monkeypatched registry
            monkeypatch.setitem(registry._REGISTRY, "TINY", workload_of(build, **fields))
            build = "TINY"
        phases: list[str] = []
        usual = {"seed": 7, "input_sets": 3, "warm_up": 4, "cache_dir": str(cache), "warm_cache": True}
        made = WholeCell(spec_of(build, mode, **{**usual, **dict(spec)}), phases.append)
        made.phases = phases
        return made

    yield make
    torch.compiler.reset()
    torch_internals.inductor_config.aot_inductor.metadata = mark
    torch.set_float32_matmul_precision(precision)


class Mlp(torch.nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.dropout = torch.nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.trainings = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.second(self.dropout(self.first(x).relu()))


def replaced_call(monkeypatch, wrong):
    monkeypatch.setattr(
        suite.worker.compilation, "callable_for", lambda mode, module: lambda *inputs: wrong(module, *inputs)
    )
