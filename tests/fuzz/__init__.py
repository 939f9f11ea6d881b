"""A differential fuzzer of placement: random programs, eager against Encore, on a GPU that the CPU stands in for."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))
