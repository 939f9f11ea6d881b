"""Make CUDA graphs pay off under `torch.compile`, on the stock PyTorch wheel.

`torch.compile(model, backend="encore")` needs no import. This package has the names for everything else: `report`
tells what was done with each graph, `explain` tells it beforehand, `reset` frees it all. `graph_step` makes one CUDA
graph of a training step, and `graph_callables` makes one each of modules and functions.

A name is loaded when it is first used. Importing this package imports neither torch nor the benchmark suite, whose
command is `encore` (`python -m encore`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optimizations import (
        GraphReport,
        Options,
        Refusal,
        StepChanged,
        StepRefused,
        StepReport,
        UnsupportedTorch,
        WrongOption,
        WrongOrder,
        explain,
        graph_callables,
        graph_step,
        recordings,
        report,
        reset,
        settled,
        static_loader,
    )

__all__ = [
    "GraphReport",
    "Options",
    "Refusal",
    "StepChanged",
    "StepRefused",
    "StepReport",
    "UnsupportedTorch",
    "WrongOption",
    "WrongOrder",
    "explain",
    "graph_callables",
    "graph_step",
    "recordings",
    "report",
    "reset",
    "settled",
    "static_loader",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'encore' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module("optimizations"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
