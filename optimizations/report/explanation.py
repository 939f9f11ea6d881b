"""Explain what placement would do with a program: its FX graphs before and after, without compiling them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
import torch.fx

from optimizations import torch_internals
from optimizations.options import Options
from optimizations.placement.placing import place
from optimizations.report import PlacementReport

_RECOMPILES = 256
"""Each explanation traces again, and Dynamo counts that as a recompilation of the code."""


@dataclass(frozen=True, slots=True)
class PlacementExplanation:
    """Hold the placement of each FX graph of one call, in the order Dynamo made them. `str` gives it as text."""

    graphs: tuple[PlacementReport, ...]

    def __str__(self) -> str:
        if not self.graphs:
            return "no FX graph: Dynamo traced nothing of this call"
        return "\n\n".join("\n".join(_lines(index, graph)) for index, graph in enumerate(self.graphs))


def _lines(index: int, graph: PlacementReport) -> Iterator[str]:
    yield f"graph {index}: {graph.nodes} nodes, device {graph.device or 'none'}"
    yield from (f"  {line}" for line in graph.lines())


def explain(
    program: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> PlacementExplanation:
    """Return what placement would do with each FX graph of one call `program(*args, **kwargs)`, without compiling it.

    The call is really made, with uncompiled graphs; on fake CUDA tensors (under a `FakeTensorMode`) that needs no GPU.
    `print` shows the result as text.

    Raises:
        UnsupportedTorch, WrongOption: as the backend does.
        TypeError: the program cannot be called.
        Exception: the program itself raised it.
    """
    torch_internals.require_supported()
    settings = Options.parse(options)
    if not callable(program):
        raise TypeError(
            f"explain needs a module or function and its arguments, explain(model, x), not {type(program).__name__}"
        )
    graphs: list[PlacementReport] = []

    def collect(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(place(graph_module, example_inputs, settings).report)
        return graph_module.forward

    traced_again = torch_internals.dynamo_config.patch(recompile_limit=_RECOMPILES, error_on_recompile=False)
    with traces_forgotten(), traced_again:
        torch.compile(program, backend=collect)(*args, **kwargs)
    return PlacementExplanation(tuple(graphs))


@contextlib.contextmanager
def traces_forgotten() -> Iterator[None]:
    """Remove the block's traces and sizes from Dynamo's caches.

    Dynamo counts the traces of a code object, for any caller: after eight traces it runs the code uncompiled, and a
    size that differs from an earlier trace's becomes a symbol. For code that had been compiled before the block only
    the sizes are removed: Dynamo can drop all traces of a code object, but not a single one.
    """
    compiled = {code for code in _traced() if torch_internals.cache_entries(code)}
    sizes = torch_internals.sizes_seen()
    before = copy.deepcopy(dict(sizes))
    try:
        yield
    finally:
        sizes.clear()
        sizes.update(before)
        for code in _traced():
            if code not in compiled and torch_internals.cache_entries(code):
                torch_internals.reset_code(code)


def _traced() -> list[CodeType]:
    codes = (reference() for reference in torch_internals.input_codes.seen)
    return [code for code in codes if code is not None]
