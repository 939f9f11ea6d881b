"""Helpers for tests on a GPU: compiled functions, calls, comparisons, reports, captures and subprocesses."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import optimizations
from optimizations import torch_internals
from optimizations.report.recordings import RecordingReport

SEED = 1337

BEHIND_CYCLES = 1_000_000
"""Half a millisecond."""

Function = Callable[..., Any]


def forget() -> None:
    """Drop every compiled function, report and graph."""
    optimizations.reset()
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def allocated() -> int:
    """Return the bytes of all tensors. Free the workspaces of cuBLAS first: they depend on recordings."""
    torch_internals.cudagraph_trees.clear_cublass_cache()
    return torch.cuda.memory_allocated()


def default_numerics() -> None:
    """Set PyTorch's default numerics; workloads set others (`suite.measure.iteration.set_numerics`)."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False


def recordings() -> list[RecordingReport]:
    return [recording for graph in optimizations.report() for recording in graph.recordings]


def replays() -> int:
    return sum(one.replays for one in recordings())


def drawn(*shape: int, seed: int) -> torch.Tensor:
    """Return numbers that are the same on every GPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def assert_same_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(mine, theirs), f"tensor {index}"


def run_script(script: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    """Run a script of tests in a process of its own, and return the last line that it prints, which is JSON."""
    command = [sys.executable, str(script), *arguments]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{arguments} ended with {done.returncode}:\n{done.stderr[-4000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def copy_reasons() -> str:
    """Return why inputs are copied and calls have no graph, for the message of a failing test."""
    uncaptured = [f"{one.calls} calls: {one.reason}" for graph in optimizations.report() for one in graph.uncaptured]
    return "\n".join(uncaptured) + "\n".join(
        f"{recording.direction}: {one.name}: {'; '.join(one.reasons)}"
        for recording in recordings()
        for one in recording.inputs
        if not one.indirect
    )


def encore(function: Function, choice: str = "auto", **keywords: Any) -> Function:
    return torch.compile(function, backend="encore", options={"indirection": choice}, **keywords)


def stock(function: Function, **keywords: Any) -> Function:
    return torch.compile(function, options={"triton.cudagraphs": True}, **keywords)


def call(function: Function, *inputs: Any) -> list[torch.Tensor]:
    """The results of a call of a new step, copied out of the graph's memory."""
    torch.compiler.cudagraph_mark_step_begin()
    with torch.no_grad():
        results = function(*inputs)
    return [one.clone() for one in (results if isinstance(results, (list, tuple)) else (results,))]


def assert_like_stock(
    function: Function, make: Callable[[int], Sequence[torch.Tensor]], choice: str = "auto", replays: int = 32
) -> None:
    """Results on inputs at ever new addresses are those of stock's graphs on the same data, bit for bit.

    The host frees inputs before the device has read them.
    """
    reference, indirect = stock(function), encore(function, choice)
    kept: deque[list[torch.Tensor]] = deque(maxlen=5)
    for step in range(replays):
        kept.append([one.clone() for one in make(step)])
        expected = call(reference, *(one.clone() for one in kept[-1]))
        torch.cuda._sleep(BEHIND_CYCLES)
        found = call(indirect, *kept[-1])
        where = f"step {step}\n{copy_reasons()}\n"
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=lambda text, where=where: f"{where}{text}")
