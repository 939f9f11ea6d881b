"""Captures programs of `explain_programs` one after another in this process, and writes what was seen as JSON.

The tests of explain start it once: making PyTorch believe in a GPU is for a process of its own, and importing the
compiler takes longer than any of the programs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import explain_programs
import torch

from suite.explain.build import build_program
from suite.explain.capture import capture
from suite.explain.generated_code import triton_kernels
from suite.explain.pretended_gpu import pretended_gpu
from suite.explain.targets import load_program
from suite.explain.triton_kernels import compile_kernel

COMPILED = "mask_attribute"
CAPABILITIES = (80, 90)


def main(answer: Path, names: list[str]) -> None:
    seen = {name: _capture(name) for name in names}
    answer.write_text(json.dumps({"programs": seen, "cuda_afterwards": torch.cuda.is_available()}))


def _capture(name: str) -> dict[str, Any]:
    found = capture(build_program(load_program(f"{explain_programs.__name__}:{name}")))
    sources = {setting: graph.source for lowered in found.lowered for setting, graph in lowered.items()}
    return {
        "graphs": [graph.model_dump(mode="json") for graph in found.graphs],
        "breaks": [each.model_dump(mode="json") for each in found.breaks],
        "limits": found.limits,
        "failure": None if found.failure is None else repr(found.failure),
        "sources": sources,
        "compiled": _compile(sources["graph"]) if name == COMPILED else [],
    }


def _compile(source: str) -> list[dict[str, Any]]:
    with pretended_gpu():
        return [
            {
                "name": compiled.name,
                "target": compiled.target,
                "signature": dict(compiled.signature),
                "ptx": compiled.ptx,
                "cubin_bytes": len(compiled.cubin),
            }
            for kernel in triton_kernels(source)
            for capability in CAPABILITIES
            for compiled in compile_kernel(kernel, capability)
        ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
