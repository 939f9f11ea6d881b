"""Capture programs of `explain_programs` one after another in this process, and write what explain saw as JSON.

The tests of explain start it once: a pretended GPU needs its own process, and importing the compiler takes longer than
any of the programs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import explain_programs
import torch

from models.own_program import load
from suite.explain.build import build_program
from suite.explain.capture import capture


def main(answer: Path, names: list[str]) -> None:
    seen = {name: _capture(name) for name in names}
    answer.write_text(json.dumps({"programs": seen, "cuda_afterwards": torch.cuda.is_available()}))


def _capture(name: str) -> dict[str, Any]:
    found = capture(build_program(load(f"{explain_programs.__name__}:{name}")))
    return {
        "graphs": [graph.model_dump(mode="json") for graph in found.graphs],
        "breaks": [each.model_dump(mode="json") for each in found.breaks],
        "limits": found.limits,
        "failure": None if found.failure is None else repr(found.failure),
        "sources": {one.setting: one.source for graph in found.graphs for one in graph.lowerings},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
