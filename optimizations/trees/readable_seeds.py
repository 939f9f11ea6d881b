"""Move the random state of memory-efficient attention to the device on which a backward reads it.

See Note [Seeds of attention] in `in_place.generated`. A backward may run without a graph after a forward that replayed
one for many reasons: live results, `retain_graph`, a failed recording, a first call, a reset. So the seeds are moved in
one place, around the generated function, for every caller. The opposite direction is impossible: a copy from pageable
host memory cannot be captured. So a backward whose seeds are in host memory is never recorded or replayed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimizations.in_place.generated import names_a_reader, read_function

Run = Callable[[list[Any]], Any]


def with_readable_seeds(run: Run, seeds: Callable[[], Sequence[int]]) -> Run:
    """Return `run` (a generated function), called with seeds in host memory unless the stream is being captured."""

    def run_with_readable_seeds(inputs: list[Any]) -> Any:
        found = seeds()
        if found and not torch.cuda.is_current_stream_capturing():
            for index in found:
                if not is_on_host(inputs[index]):
                    inputs[index] = to_host(inputs[index])  # the host waits for the device
        return run(inputs)

    return run_with_readable_seeds


def any_on_host(inputs: Sequence[Any], seeds: Sequence[int]) -> bool:
    """Return whether a seed is in host memory, so that no graph may read it."""
    return any(is_on_host(inputs[index]) for index in seeds)


def give_readable_seeds(compiled_graph: Any, *, graphed: bool) -> None:
    """Let functions that Inductor runs without graphs read their seeds.

    Inductor may refuse graphs for a backward whose forward has one, or split the graph at an operator.

    Args:
        compiled_graph: a `CompiledFxGraph` after `post_compile`. Its callables are replaced.
        graphed: whether its function, or its partitions, are run by CUDA graphs.
    """
    if not names_a_reader(compiled_graph.source_code):
        return
    partitioned = bool(compiled_graph.partition_maps)
    if graphed and not partitioned:
        return
    functions = {
        one.name: one for one in ast.walk(ast.parse(compiled_graph.source_code)) if isinstance(one, ast.FunctionDef)
    }
    if not graphed and partitioned:
        wrappers = [
            lambda run, number=number: _wrapped(run, functions.get(f"partition_{number}"))
            for number in range(len(compiled_graph.partition_maps))
        ]
        compiled_graph.recursively_apply_fns(wrappers)
    compiled_graph.current_callable = _wrapped(compiled_graph.current_callable, functions.get("call"))


def _wrapped(run: Run, definition: ast.FunctionDef | None) -> Run:
    seeds = read_function(definition, {}).seeds if definition is not None else ()
    return with_readable_seeds(run, lambda: seeds) if seeds else run


def is_on_host(seed: Any) -> bool:
    """Return whether a seed is in host memory."""
    return isinstance(seed, torch.Tensor) and not seed.is_cuda


def to_host(seed: torch.Tensor) -> torch.Tensor:
    """Return a copy of a seed in host memory."""
    return seed.cpu()
