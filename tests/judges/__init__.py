"""Tests that other projects wrote, run with Encore as the backend; `docs/judges.md` shows how to start them."""

import sys
from pathlib import Path

# Their modules are not found by the name `tests`, which is another project's where its tests are run.
sys.path.append(str(Path(__file__).parents[1] / "support"))
