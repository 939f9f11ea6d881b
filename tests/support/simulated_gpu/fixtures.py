"""The simulated GPU's fixtures. Its modules are imported when a test first uses one: they import all of Encore."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from simulated_gpu.allocator import Workspaces
    from simulated_gpu.compiler import CompiledOnCpu, FakeMaker
    from simulated_gpu.runtime import CudaOnCpu


@pytest.fixture
def cuda_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaOnCpu]:
    """Run `torch.cuda` on the simulated driver."""
    from simulated_gpu.runtime import played_by_the_cpu

    yield from played_by_the_cpu(monkeypatch)


@pytest.fixture
def compiled_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompiledOnCpu]:
    """Compile whole programs for the simulated GPU."""
    from simulated_gpu.compiler import simulated

    yield from simulated(monkeypatch)


@pytest.fixture
def cuda_in_disguise(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMaker]:
    """Have Inductor take CPU programs for CUDA ones, and yield what stands in for the maker of graphs."""
    from simulated_gpu.compiler import in_disguise

    yield from in_disguise(monkeypatch)


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspaces]:
    """Replace PyTorch's allocator and cuBLAS's workspaces."""
    from simulated_gpu.allocator import replaced_workspaces

    yield from replaced_workspaces(monkeypatch)


@pytest.fixture
def weights_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take inputs at fixed addresses of earlier recordings for dead. Tests hold them, so no address comes again."""
    from optimizations.trees.node import EncoreNode

    monkeypatch.setattr(EncoreNode, "may_come_back", lambda node: False)
