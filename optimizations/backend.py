"""Provide the function that `torch.compile(model, backend="encore")` finds: Encore's backend, or else stock's.

It is registered as an entry point of the group `torch_dynamo_backends`, so no import is needed. This module itself
needs no private name of PyTorch: on a version that Encore does not know, and where a name is missing, graphs are
compiled by Inductor with its own CUDA graphs.
"""

from __future__ import annotations

import difflib
import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_origin

from optimizations import torch_internals
from optimizations.options import Options, WrongOption

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

            return compile_graph(graph_module, example_inputs, settings, patches_of(mode, settings.inductor))
        except torch_internals.UnsupportedTorch as error:
            reason = str(error)
    _warn_of_stock(reason)
    patches = patches_of(mode, settings.inductor)
    return torch_internals.compile_fx.compile_fx(graph_module, example_inputs, config_patches=patches)


@functools.cache
def _warn_of_stock(reason: str) -> None:
    """Say once that graphs are compiled without Encore."""
    warnings.warn(f"Encore compiles with Inductor's own CUDA graphs: {reason}", stacklevel=3)


def patches_of(mode: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return Inductor's settings for a graph: of a mode, with CUDA graphs in any, and with the options given.

    Raises:
        WrongOption: a mode, or an option, is unknown, or has a value it cannot have.
    """
    modes: Mapping[str, Mapping[str, Any]] = torch_internals.list_mode_options()
    if mode is not None and mode not in modes:
        raise WrongOption(f"mode {mode!r} is not one of Inductor's; allowed: {', '.join(map(repr, modes))}.")
    return {**modes[mode or "default"], "triton.cudagraphs": True, **checked(given)}


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by Inductor's names for them. They may be written with hyphens, as stock takes them.

    Raises:
        WrongOption: Inductor has no such option, or it has another type.
    """
    known = torch_internals.inductor_config.get_config_copy() if given else {}
    options = {}
    for written, value in given.items():
        name = str(written).replace("-", "_")
        if name not in known:
            near = ", ".join(difflib.get_close_matches(name, known, n=3))
            hint = f"; did you mean {near}?" if near else "; torch._inductor.list_options() names all."
            raise WrongOption(f"unknown option {written!r} for Inductor, given as `inductor`{hint}")
        kind = torch_internals.inductor_config.get_type(name)
        if get_origin(kind) is None and not isinstance(value, kind):
            wanted = getattr(kind, "__name__", str(kind))
            raise WrongOption(f"option {written!r} for Inductor must be of type {wanted}, not {value!r}.")
        options[name] = value
    return options


def _reset() -> None:
    """Free what compiled functions hold: `torch.compiler.reset` calls this of a backend."""
    compiled = sys.modules.get("optimizations.compiled_graph")
    if compiled is not None:
        compiled.reset()


encore.reset = _reset  # type: ignore[attr-defined]  # where Dynamo looks for it
