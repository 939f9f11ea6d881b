"""Writes `triton_kernels.json`: kernels that Inductor generates for the registered workloads, for tests without a GPU.

Each workload is lowered offline at its full size, as `encore explain` does it. From the kernels that come out a few are
kept per workload, each with what Inductor would compile it with: signature, constants, alignment of the arguments,
warps and stages of its first configuration. Kernels that differ in their name only are kept once.

    python tests/data/extract_triton_kernels.py [--per-workload N] [WORKLOAD ...]
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_name("triton_kernels.json")
KINDS = ("triton_tem", "triton_red", "triton_per", "triton_poi")
"""Prefixes of Inductor's kernels (template, reduction, persistent reduction, pointwise), rarest first."""

COMPILE_OPTIONS = ("enable_fp_fusion", "launch_pdl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help="acronyms; all registered ones by default")
    parser.add_argument("--per-workload", type=int, default=3)
    parser.add_argument("--one", action="store_true", help="print the kernels of one workload, from this process")
    chosen = parser.parse_args()
    if chosen.one:
        (name,) = chosen.workloads
        json.dump(list(kernels_of(name)), sys.stdout)
        return

    import torch
    import triton

    from models.registry import workloads

    kept: dict[str, dict[str, Any]] = {}
    for name in chosen.workloads or workloads():
        # A process each: pretending that there is a GPU leaves traces.
        done = subprocess.run([sys.executable, __file__, "--one", name], stdout=subprocess.PIPE, check=False)
        if done.returncode:
            print(f"{name}: failed", file=sys.stderr)
            continue
        fresh = [kernel for kernel in json.loads(done.stdout) if nameless(kernel) not in kept]
        for kernel in choose(fresh, chosen.per_workload):
            kept[nameless(kernel)] = kernel
        print(f"{name}: {len(fresh)} new kernels", file=sys.stderr)
    content = {"torch": torch.__version__, "triton": triton.__version__, "kernels": list(kept.values())}
    TARGET.write_text(json.dumps(content, indent=1) + "\n")


def nameless(kernel: dict[str, Any]) -> str:
    """The kernel's source without its name, which holds a counter."""
    return str(kernel["source"]).replace(kernel["name"], "kernel")


def choose(kernels: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Up to `count` of them, kinds in turn, the longest of each kind first."""
    by_kind = {
        kind: sorted((one for one in kernels if one["name"].startswith(kind)), key=lambda one: -len(one["source"]))
        for kind in KINDS
    }
    chosen: list[dict[str, Any]] = []
    while len(chosen) < count and any(by_kind.values()):
        for found in by_kind.values():
            if found and len(chosen) < count:
                chosen.append(found.pop(0))
    return chosen


def kernels_of(name: str) -> Iterator[dict[str, Any]]:
    """The kernels of one workload under stock CUDA graphs, each once."""
    from models.registry import find
    from suite.explain.build import build_workload
    from suite.explain.capture import capture
    from suite.measure.modes import GRAPH_MODE, MODES

    sys.path.append(str(Path(__file__).parents[1] / "support"))
    from generated_kernels import triton_kernels

    program = build_workload(find(name), variant=None, size="full")
    found = capture(program, {GRAPH_MODE: MODES[GRAPH_MODE].options})
    seen = set()
    for lowered in found.lowered:
        for kernel in triton_kernels(lowered[GRAPH_MODE].source) if GRAPH_MODE in lowered else ():
            record = described(name, kernel.name, kernel.source)
            if nameless(record) not in seen:
                seen.add(nameless(record))
                yield record


def described(workload: str, name: str, source: str) -> dict[str, Any]:
    """What compiling the kernel takes, from Inductor's own description of it in `source`."""
    tuner = getattr(imported(source.replace("triton_helpers.set_driver_to_gpu()", ""), name), name)
    config, meta = tuner.configs[0], tuner.triton_meta
    signature = dict(meta["signature"])
    return {
        "workload": workload,
        "name": name,
        "source": bare(source, name),
        "signature": signature,
        "constants": {**meta["constants"], **config.kwargs},
        "divisible_by_16": sorted(
            place for (place,), notes in meta["configs"][0].items() if ["tt.divisibility", 16] in notes
        ),
        "options": {
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            **{option: meta[option] for option in COMPILE_OPTIONS if option in meta},
        },
    }


def bare(source: str, name: str) -> str:
    """Imports of the module, and the kernel with no decorator but `triton.jit`."""
    lines = source.splitlines()
    parts = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            parts.append(ast.unparse(node))
        elif isinstance(node, ast.FunctionDef):
            body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            parts.append(f"\n\n@triton.jit\n{body}")
    return re.sub(r"[ \t]+\n", "\n", "\n".join(parts)) + "\n"


def imported(source: str, name: str) -> Any:
    """The module of this source; Triton reads kernels from files only."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
