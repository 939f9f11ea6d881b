"""Fixtures of the tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.fake_command import Fake


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)
