"""Explain workloads and the programs of `explain_programs`, and provide what explain and Inductor made of them.

Each is explained in a process of its own, as by `encore explain`, but forked off one that has imported PyTorch's
compilers, which takes longer than any of the programs: `python explain_seen.py FOLDER TARGET...`, with a file
FOLDER/NUMBER.json for each target.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import explain_programs

from suite.explain.records import Explanation, FxGraph, Lowering

# Explain imports these when PyTorch has a pretended GPU. None of them queries the GPU when it is imported.
COMPILERS = (
    "torch._dynamo.aot_compile",
    "torch._inductor.fx_passes.joint_graph",
    "torch._inductor.fx_passes.pad_mm",
    "torch._inductor.fx_passes.post_grad",
    "torch._inductor.lowering",
    "torch._inductor.scheduler",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.codegen.wrapper",
    "transformers",
)
TRACED = "/traced"


class Seen:
    """Hold what was seen of one target.

    `lines`: of stock's generated module, the first of `source`, (line, stack trace of the program) as Inductor has it.
    """

    def __init__(self, answer: dict[str, Any]) -> None:
        self.explanation = Explanation.model_validate(answer["explanation"])
        self.source, self.lines = answer["modules"][0] if answer["modules"] else ("", [])

    @property
    def graph(self) -> FxGraph:
        assert self.explanation.error is None
        (graph,) = self.explanation.graphs
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


def explained(folder: Path, *targets: str) -> dict[str, Seen]:
    """Return what was seen of targets by name: `ACRONYM/VARIANT` in its tiny size, or a name of `explain_programs`.

    Of a target with `TRACED` after it nothing is lowered, which is what takes time.
    """
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, __file__, str(folder), *targets],
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
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = [json.loads((folder / f"{number}.json").read_text()) for number in range(len(targets))]
    return {name.removesuffix(TRACED): Seen(answer) for name, answer in zip(targets, answers, strict=True)}


def at(text: str) -> str:
    """Return the place of the one line of `explain_programs` that holds `text`."""
    lines = inspect.getsource(explain_programs).splitlines()
    (number,) = (number for number, line in enumerate(lines, start=1) if text in line)
    return f"tests/support/explain_programs.py:{number} in "


def main(folder: Path, targets: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    for name in COMPILERS:
        importlib.import_module(name)
    gc.freeze()  # no collection in a child touches, and so copies, what is here
    for number, target in enumerate(targets):
        child = os.fork()
        if child == 0:
            (folder / f"{number}.json").write_text(json.dumps(_explain(target)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, f"{target}: {status}"


def _explain(target: str) -> dict[str, Any]:
    from suite.explain import capture, lowering, worker
    from suite.explain.targets import Target

    modules: list[Any] = []
    load_nothing = lowering._Seen.load

    def noting(seen: Any, graph: Any, code: Any) -> Any:
        modules.append((code.value, [(number, node.stack_trace) for number, node in code.line_map]))
        return load_nothing(seen, graph, code)

    lowering._Seen.load = noting  # type: ignore[method-assign]
    if target.endswith(TRACED):
        capture._lowered = lambda *graph: ({}, {})  # type: ignore[assignment]
    name, _, variant = target.removesuffix(TRACED).partition("/")
    wanted = Target(name, variant, "tiny") if variant else Target(f"{explain_programs.__name__}:{name}", None)
    explanation = worker.explain(wanted).explanation
    assert explanation is not None
    return {"explanation": explanation.model_dump(mode="json"), "modules": modules}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
