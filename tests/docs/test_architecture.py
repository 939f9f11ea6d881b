"""docs/architecture.md shows the packages that the code has, and a change of the code shows."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "draw_architecture.py"


@pytest.fixture
def drawing() -> Any:
    spec = importlib.util.spec_from_file_location("draw_architecture", SCRIPT)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_up_to_date() -> None:
    ran = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_page_is_short(drawing: Any) -> None:
    before, _, rest = drawing.PAGE.read_text(encoding="utf-8").partition(drawing.BEGIN)
    assert len((before + rest.partition(drawing.END)[2]).split()) <= 600
