"""Words that options of several commands take."""

from __future__ import annotations

from enum import StrEnum


class Device(StrEnum):
    cuda = "cuda"
    cpu = "cpu"


class Size(StrEnum):
    full = "full"
    tiny = "tiny"
