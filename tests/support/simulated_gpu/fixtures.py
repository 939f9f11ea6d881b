"""The simulated GPU's fixtures. Its modules are imported when a test first uses one: they import all of Encore."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest


def _simulation(module: str, name: str) -> Any:
    """Return a fixture that yields what a generator of a module yields."""

    @pytest.fixture
    def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        yield from getattr(importlib.import_module(f"simulated_gpu.{module}"), name)(monkeypatch)

    return made


cuda_on_cpu = _simulation("runtime", "played_by_the_cpu")
compiled_on_cpu = _simulation("compiler", "simulated")
cuda_in_disguise = _simulation("compiler", "in_disguise")
workspaces = _simulation("allocator", "replaced_workspaces")


@pytest.fixture
def weights_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take inputs at fixed addresses of earlier recordings for dead. Tests hold them, so no address comes again."""
    from optimizations.trees.node import EncoreNode

    monkeypatch.setattr(EncoreNode, "may_come_back", lambda node: False)
