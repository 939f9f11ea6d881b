"""Whether the host has a GPU of NVIDIA's, told without its driver: who has asked that can fork no more."""

from __future__ import annotations

from pathlib import Path

HAS_GPU = Path("/dev/nvidiactl").exists()
