"""Provide the function that `torch.compile(model, backend="encore")` finds: Encore's backend, or else stock's.

It is registered as an entry point of the group `torch_dynamo_backends`, so no import is needed. This module itself
needs no private name of PyTorch: on a version that Encore does not know, and where a name is missing, graphs are
compiled by Inductor with its own CUDA graphs.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optimizations import torch_internals
from optimizations.inductor_options import patches_of
from optimizations.options import Options

if TYPE_CHECKING:
    import torch.fx


def encore(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one FX graph of Dynamo.

    `mode` is one of Inductor's, which libraries pass on without asking (Hugging Face's `generate` does): its settings
    are Inductor's, and CUDA graphs are used in any.

    Raises:
        WrongOption: an option or a mode is unknown, or has a value it cannot have.
    """
    settings = Options.parse(options)
    reason = torch_internals.unsupported()
    if reason is None:
        try:
            from optimizations.compiled_graph import compile_graph

            return compile_graph(graph_module, example_inputs, settings, mode)
        except torch_internals.UnsupportedTorch as error:
            reason = str(error)
    _warn_of_stock(reason)
    return _with_stock(graph_module, example_inputs, settings.inductor, mode)


@functools.cache
def _warn_of_stock(reason: str) -> None:
    """Say once that graphs are compiled without Encore."""
    warnings.warn(f"Encore compiles with Inductor's own CUDA graphs: {reason}", stacklevel=3)


def _with_stock(
    graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], given: Mapping[str, Any], mode: str | None
) -> Callable[..., Any]:
    """Compile as `torch.compile(mode="reduce-overhead")` does, with the mode's settings and options for Inductor."""
    patches = patches_of(mode, given)
    return torch_internals.compile_fx.compile_fx(graph_module, example_inputs, config_patches=patches)


def _reset() -> None:
    """Free what compiled functions hold: `torch.compiler.reset` asks this of a backend."""
    compiled = sys.modules.get("optimizations.compiled_graph")
    if compiled is not None:
        compiled.reset()


encore.reset = _reset  # type: ignore[attr-defined]  # where Dynamo looks for it
