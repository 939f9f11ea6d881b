"""What a process does before it has a cell: imports, and the start of the compilers."""

from __future__ import annotations

import pytest
import torch
from tiny_cells import Mlp, cell

import suite.worker.start
from suite.worker.start import start

__all__ = ["cell"]


@pytest.mark.parametrize(
    ("mode", "known", "started"), [("eager", True, False), ("graph", None, False), ("graph", True, True)]
)
def test_waiting_process_imports_its_model_and_starts_compilers(cell, monkeypatch, mode, known, started):
    built, toolchains = [], []
    spec = cell(lambda: built.append("tiny") or Mlp(), mode, spec={"size": "full", "vec_isa_ok": known})._spec
    monkeypatch.setattr(suite.worker.start, "start_toolchain", lambda device, *rest: toolchains.append(device.type))
    start(spec.model_copy(update={"device": "cuda"}))
    assert built == ["tiny"]
    assert toolchains == ["cpu"] * started, "the GPU is not touched"


def test_what_is_asked_finds_out_what_the_compilers_can_do(cell, monkeypatch):
    asked = []
    monkeypatch.setattr(suite.worker.start, "start_toolchain", lambda *given: asked.append(given) or True)
    spec = cell(Mlp, "compile", spec={"vec_isa_ok": None})._spec
    assert start(spec).vec_isa_ok is None and not asked
    assert start(spec, asked=True).vec_isa_ok is True
    assert asked == [(torch.device("cpu"), None, spec.headers_dir)]


def test_what_waits_says_nothing_of_a_model_that_cannot_be_built(cell):
    """It will fail where its row says so."""
    start(cell(lambda: 1 / 0)._spec)
