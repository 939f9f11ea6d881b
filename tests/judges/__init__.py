"""Tests that other projects wrote, run with Encore as the backend; `docs/judges.md` shows how to start them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

# Not by the name `tests`, which is another project's where its tests are run.
sys.path.append(str(Path(__file__).parents[1]))
FORCED_BRANCHES = importlib.import_module("support.forced_branches")
JSON_WORKER = importlib.import_module("support.json_worker")
ROW_FILES = importlib.import_module("support.row_files")
