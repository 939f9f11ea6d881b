"""The page on the architecture is what the code gives, and a change of the code shows."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "draw_architecture.py"


def test_the_page_is_up_to_date() -> None:
    ran = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_another_module_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("draw_architecture", SCRIPT)
    assert spec is not None and spec.loader is not None
    drawing: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    for package in drawing.PACKAGES:
        (tmp_path / package / "low").mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text(f'"""The package {package}."""\n')
        (tmp_path / package / "low" / "__init__.py").write_text("")
        (tmp_path / package / "high.py").write_text(f'"""What is high. More."""\nimport {package}.low\n')
    monkeypatch.setattr(drawing, "ROOT", tmp_path)
    page = drawing.page()
    assert "| `suite/high.py` | What is high. |" in page
    assert "    high --> low\n" in page
    assert "low --> high" not in page
