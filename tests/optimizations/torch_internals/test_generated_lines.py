"""A line of a module that Inductor generated leads to the program's line it was made of."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import generated_lines
import pytest
import torch

from optimizations import torch_internals
from optimizations.concurrency.launch_log import LaunchLog
from optimizations.torch_internals.generated_modules import source_line


def program(x: torch.Tensor) -> torch.Tensor:
    y = x @ x
    return y.sin() @ y


def test_line_of_generated_code_maps_to_the_program() -> None:
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


def test_kernels_of_a_partition_map_to_the_program(tmp_path: Path) -> None:
    """CUDA graphs are made of partitions, whose lines stock PyTorch drops."""
    answer, script = tmp_path / "answer.json", Path(generated_lines.__file__)
    folders = (str(Path(__file__).parents[3]), str(script.parent))
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(answer)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "CUDA_VISIBLE_DEVICES": "", **caches},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.exists(), done.stderr[-4000:]
    left, right, product = (f"{script}:{number} in forward" for number in generated_lines.LINES)
    found = {}
    for module in json.loads(answer.read_text()):
        text, path = module["text"], str(tmp_path / f"{module['is_backward']}.py")
        assert "def partition_0(args):" in text
        torch_internals.PyCodeCache.linemaps[path] = list(zip(*module["lines"], strict=True))
        found[module["is_backward"]] = [
            source_line(path, number)
            for number, line in enumerate(text.splitlines(), start=1)
            if ".run(" in line or "extern_kernels." in line
        ]
    assert found[False] == [left, right, product]
    assert len(found[True]) == 5 and set(found[True]) == {left, right}


def test_launches_of_generated_code_have_lines_of_the_program() -> None:
    nodes = 0

    class Counting(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal nodes
            nodes += 1
            return func(*args, **(kwargs or {}))

    with torch_internals.fresh_cache(), torch_internals.inductor_config.patch({"fallback_by_default": True}):
        torch.compiler.reset()
        before = len(torch_internals.PyCodeCache.modules)
        torch.compile(program)(torch.ones(2, 2))
        (module,) = torch_internals.PyCodeCache.modules[before:]
        log = LaunchLog(lambda: nodes, device_type="cpu")
        with Counting(), log.noting(vars(module)):
            module.call([torch.ones(2, 2)])
    torch.compiler.reset()
    first = inspect.getsourcelines(program)[1]
    found = [(one.launch.name, source_line(*one.launch.line)) for one in log.logged if one.launch.line is not None]
    assert found == [
        ("aten.mm.default", f"{__file__}:{first + 1} in program"),
        ("aten.sin.default", f"{__file__}:{first + 2} in program"),
        ("aten.mm.default", f"{__file__}:{first + 2} in program"),
    ]


def test_line_of_another_file_has_none() -> None:
    assert source_line(__file__, 3) is None


def test_unexpected_stack_frames_give_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [[{"filename": "a.py"}], [("a.py", 3)], [{"filename": "a.py", "line": "x", "name": "f"}]]
    for answer in answers:
        monkeypatch.setattr(
            torch_internals.PyCodeCache, "stack_frames_for_code", lambda path, line, found=answer: found
        )
        assert source_line("a.py", 1) is None
