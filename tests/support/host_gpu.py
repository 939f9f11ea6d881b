"""Find whether the host has an NVIDIA GPU, without its driver: a process that called that cannot fork any more."""

from __future__ import annotations

from pathlib import Path

HAS_GPU = Path("/dev/nvidiactl").exists()
