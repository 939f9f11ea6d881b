"""A line of a module that Inductor generated leads to the program's line it was made of."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizations import torch_internals
from optimizations.torch_internals.generated_modules import source_line


def program(x: torch.Tensor) -> torch.Tensor:
    y = x @ x
    return y.sin() @ y


def test_line_of_generated_code_leads_to_the_program() -> None:
    with torch_internals.fresh_cache(), torch_internals.inductor_config.patch({"fallback_by_default": True}):
        torch.compiler.reset()
        before = len(torch_internals.PyCodeCache.modules)
        torch.compile(program)(torch.ones(2, 2))
        (module,) = torch_internals.PyCodeCache.modules[before:]
        path = module.__file__
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        found = {
            name: source_line(path, number)
            for name in ("aten.mm.default(", "aten.sin.default(")
            for number, line in enumerate(lines, start=1)
            if f"= torch.ops.{name}" in line
        }
    torch.compiler.reset()
    first = inspect.getsourcelines(program)[1]
    assert found["aten.sin.default("] == f"{__file__}:{first + 2} in program"
    assert found["aten.mm.default("] == f"{__file__}:{first + 2} in program"  # the last of two


def test_line_of_another_file_has_none() -> None:
    assert source_line(__file__, 3) is None


def test_pytorch_that_answers_otherwise_costs_only_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [[{"filename": "a.py"}], [("a.py", 3)], [{"filename": "a.py", "line": "x", "name": "f"}]]
    for answer in answers:
        monkeypatch.setattr(
            torch_internals.PyCodeCache, "stack_frames_for_code", lambda path, line, found=answer: found
        )
        assert source_line("a.py", 1) is None
