"""Encore: CUDA graphs that pay off under `torch.compile`, on the stock PyTorch wheel.

`torch.compile(model, backend="encore")` is the whole interface. Beside it: `Options` documents what `options={...}`
takes, `report` tells what was done with each graph, `explain` tells it beforehand, `reset` forgets and frees.
Importing this package imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from optimizations.options import Options, WrongOption
from optimizations.report import GraphReport, report
from optimizations.torch_internals import UnsupportedTorch

if TYPE_CHECKING:
    from optimizations.report.explanation import Explanation

__all__ = ["GraphReport", "Options", "UnsupportedTorch", "WrongOption", "explain", "report", "reset"]


def explain(
    program: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Explanation:
    """What placement would do with each FX graph of one call `program(*args, **kwargs)`, without compiling it.

    The call is really made, uncompiled graph by graph; on fake CUDA tensors (under a `FakeTensorMode`) that needs no
    GPU. `print` shows the result as text.

    Raises:
        UnsupportedTorch, WrongOption: as the backend does.
        Exception: whatever the program raises itself.
    """
    from optimizations.report.explanation import explain as explain_call

    return explain_call(program, args, kwargs, options)


def reset() -> None:
    """Forget all reports, and free Encore's CUDA graphs, their memory pools, its kernels, and what placement keeps on
    the GPU.

    Compiled functions stay usable: they allocate and record anew at their next calls.
    """
    from optimizations.backend import release_feeds
    from optimizations.capture.trees.maker import release_recordings
    from optimizations.replay.bound import release_bindings
    from optimizations.report import LEDGER

    LEDGER.clear()
    release_bindings()
    release_recordings()
    release_feeds()
