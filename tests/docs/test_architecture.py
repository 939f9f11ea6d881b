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


def test_new_package_and_its_imports_are_drawn(drawing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, text in {
        "high": "import optimizations.low\n",
        "low": "",
        "report": "import optimizations.low\n",
    }.items():
        (tmp_path / "optimizations" / package).mkdir(parents=True)
        (tmp_path / "optimizations" / package / "__init__.py").write_text(f'"""Hold {package}. More."""\n{text}')
    (tmp_path / "optimizations" / "backend.py").write_text("def late():\n    from optimizations.high import x\n")
    monkeypatch.setattr(drawing, "ROOT", tmp_path)
    text = drawing.generated()
    assert "| `optimizations/low` | Hold low. |" in text
    assert "    high --> low\n" in text
    assert "    backend --> high\n" in text
    assert "low --> high" not in text
    assert "report --> low" not in text


def test_page_without_marks_is_refused(drawing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "architecture.md"
    page.write_text("# Architecture\n")
    monkeypatch.setattr(drawing, "PAGE", page)
    with pytest.raises(ValueError, match="lacks the marks"):
        drawing.page()
