"""What the fuzzer shares with the other tests of placement, wherever it is started."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from simulated_gpu.placement import OnCpu, bits, retargeted

__all__ = ["OnCpu", "bits", "retargeted"]
