"""Fixtures of the tests of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.fake_command import COMMANDS_STARTED, Fake


@pytest.fixture(scope="package", autouse=True)
def no_server_is_left() -> Iterator[None]:
    yield
    COMMANDS_STARTED.stop()


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)
