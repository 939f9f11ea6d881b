"""Capture the programs of `explain_programs` together, in a process of their own, and provide what explain sees.

As a script it captures them one after another, and writes what explain saw as JSON: a pretended GPU needs its own
process, and importing the compiler takes longer than any of the programs.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import explain_programs

from suite.explain.records import Explanation, FxGraph, Lowering


def captured(names: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return what this file as a script writes of these programs."""
    answer = folder / "answer.json"
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(answer), *names],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(here.parents[1]), str(here))),
            "PATH": str(folder),  # no C++ compiler: none is needed
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.exists(), done.stderr[-4000:]
    loaded: dict[str, Any] = json.loads(answer.read_text())
    return loaded


def explained(folder: Path, *targets: tuple[str, str]) -> dict[tuple[str, str], Explanation]:
    """Return explanations of workloads in their tiny sizes, by acronym and variant; see `explain_workloads`."""
    script = Path(__file__).parent / "fixtures" / "explain_workloads.py"
    done = subprocess.run(
        [sys.executable, str(script), str(folder), *itertools.chain(*targets)],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    names = [(acronym, variant.removesuffix("/traced")) for acronym, variant in targets]
    found = {name: Explanation.model_validate_json((folder / f"{'.'.join(name)}.json").read_text()) for name in names}
    assert {name: one.error for name, one in found.items() if one.error} == {}
    return found


class Seen:
    """Return what was seen of one program."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.graphs = [FxGraph.model_validate(graph) for graph in answer["graphs"]]
        self.breaks: list[dict[str, str]] = answer["breaks"]
        self.limits: list[str] = answer["limits"]
        self.failure: str | None = answer["failure"]
        self.source: str = answer["sources"].get("graph", "")

    @property
    def graph(self) -> FxGraph:
        assert self.failure is None
        (graph,) = self.graphs
        return graph

    @property
    def stock(self) -> Lowering:
        return self.lowering("graph")

    @property
    def unpartitioned(self) -> Lowering:
        return self.lowering("graph-unpartitioned")

    def lowering(self, setting: str) -> Lowering:
        (lowering,) = (each for each in self.graph.lowerings if each.setting == setting)
        return lowering


def line_of(text: str) -> int:
    """Number of the one line of `explain_programs` that holds `text`."""
    lines = inspect.getsource(explain_programs).splitlines()
    (number,) = (number for number, line in enumerate(lines, start=1) if text in line)
    return number


def at(text: str) -> str:
    return f"tests/support/explain_programs.py:{line_of(text)} in "


def main(answer: Path, names: list[str]) -> None:
    import torch

    seen = {name: _capture(name) for name in names}
    answer.write_text(json.dumps({"programs": seen, "cuda_afterwards": torch.cuda.is_available()}))


def _capture(name: str) -> dict[str, Any]:
    from models.own_program import load
    from suite.explain.build import build_program
    from suite.explain.capture import capture

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
