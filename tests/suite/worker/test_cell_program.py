"""A cell's program refuses unsupported devices and inputs."""

from __future__ import annotations

import pytest
import torch
from tiny_cells import Mlp, cell

import suite.worker.cell_program
from models import registry

__all__ = ["cell"]


def test_input_sets_that_share_memory_are_refused(cell):
    shared = torch.ones(4, 8)
    live = cell(Mlp, inputs=lambda variant, size, generator: registry.Inputs(args=(shared,)))
    with pytest.raises(ValueError, match="same address"):
        live.prepare()


def test_temporary_memory_of_an_input_set_is_freed_at_once(cell, monkeypatch):
    """Those of eight processes are made at the same time, and drawn in float32 each."""
    events = []

    def inputs(variant, size, generator):
        events.append("made")
        return registry.Inputs(args=(torch.randn(4, 8, generator=generator),))

    monkeypatch.setattr(suite.worker.cell_program, "release", lambda device: events.append("given back"))
    live = cell(Mlp, inputs=inputs, spec={"input_sets": 3})
    live.build()
    assert events == ["made", "given back"] * 3
