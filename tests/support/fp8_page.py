"""The program of docs/fp8.md, as the page has it."""

from __future__ import annotations

import re
import runpy
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fp8.md"
STEPS, MICRO_BATCHES, ROWS, WIDTH = 12, 3, 32, 64


def program() -> Any:
    """Return a module with the page's code."""
    code = "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fp8_program.py"
        path.write_text(code, encoding="utf-8")
        return SimpleNamespace(**runpy.run_path(str(path)))


def trained(page: Any, device: str, graphed: Any) -> tuple[list[list[float]], list[torch.Tensor]]:
    """Return losses, and weights, scales and histories, of a training. `graphed(model, optimizer)` returns its step."""
    torch.manual_seed(0)
    model = page.network(WIDTH).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = graphed(model, optimizer)
    data = [
        [(torch.randn(ROWS, WIDTH).bfloat16(), torch.randn(ROWS, WIDTH)) for _ in range(MICRO_BATCHES)]
        for _ in range(2)
    ]
    losses = []
    for index in range(STEPS):
        batches = [(x.to(device), wanted.to(device)) for x, wanted in data[index % 2]]
        losses.append(step(batches).tolist())
    return losses, [one.detach().float().cpu() for one in model.state_dict().values()]
