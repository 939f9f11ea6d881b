"""Hold what all cells of a run share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from suite.run.progress import Display
from suite.settings import RunSettings


@dataclass(slots=True)
class Toolchain:
    """Keep what one cell finds out about the host's compilers for all that come after it.

    Finding it out takes many seconds, so the first process that compiles does it alone. `headers` is a folder
    for compiled headers; None: each process compiles its own.
    """

    headers: Path | None = None
    vec_isa_ok: bool | None = None
    asked: bool = False


@dataclass(frozen=True, slots=True)
class Bench:
    """Hold what all cells of a run share. `timeout_s` bounds each phase of a worker, `gpu_bytes` is its GPU memory."""

    settings: RunSettings
    logs: Path
    timeout_s: float
    worker_command: Sequence[str]
    display: Display
    toolchain: Toolchain = field(default_factory=Toolchain)
    gpu_bytes: int | None = None
