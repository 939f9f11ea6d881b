"""Captures of one recording, as one JSON file: a capture made on a GPU is test data without one."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from optimizations.graph.records import Capture


class RecordedCaptures(BaseModel):
    """Two captures at different placeholder addresses and, where needed, a `control` at the addresses of the first and
    a `repeat` at those of the second. `provenance` names the program and the machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_bytes="hex", val_json_bytes="hex")

    provenance: dict[str, str]
    first: Capture
    second: Capture
    control: Capture | None = None
    repeat: Capture | None = None


def load_captures(path: Path) -> RecordedCaptures:
    return RecordedCaptures.model_validate_json(path.read_bytes())
