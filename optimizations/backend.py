"""The `torch.compile` backend `encore`: placement, then Inductor with CUDA graphs.

Registered as an entry point of the group `torch_dynamo_backends`, so that `torch.compile(model, backend="encore")`
needs no import.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_origin

import torch
import torch.fx

from optimizations import torch_internals
from optimizations.calls.binding import Binding, bind
from optimizations.calls.bound import bound, release_bindings
from optimizations.calls.double_backward import double_backwards_refused
from optimizations.calls.shortcut import shortcuts
from optimizations.calls.turns import LENT, inside_a_function
from optimizations.one_line import one_line
from optimizations.options import Options, WrongOption
from optimizations.placement import Feeds, Placement, place, untouched
from optimizations.report import LEDGER, BindingReport, Entry
from optimizations.torch_internals.cpu_results import settings_for, with_corrected_pass
from optimizations.torch_internals.outcome import watched, watching
from optimizations.torch_internals.wrappers import taking_a_list
from optimizations.trees.hook import Maker, asking, captured_by
from optimizations.trees.inner_graphs import resting
from optimizations.weak_registry import WeakRegistry

_FEEDS: WeakRegistry[Feeds] = WeakRegistry()
"""Run-time state of all graphs compiled in this process, for `reset`."""


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

    On a PyTorch that Encore does not know, the graph is compiled by Inductor with stock's CUDA graphs.

    Raises:
        WrongOption: an option or a mode is unknown, or has a value it cannot have.
    """
    settings = Options.parse(options)
    if reason := torch_internals.unsupported():
        _warn_of_stock(reason)
        patches = {**_settings_of(mode), "triton.cudagraphs": True, **_checked(settings.inductor)}
        return torch_internals.compile_fx.compile_fx(graph_module, example_inputs, config_patches=patches)
    inductor = {**_settings_of(mode), "triton.cudagraphs": True, **_checked(settings.inductor)}
    placement = _placed(graph_module, example_inputs, settings)
    try:
        return _compiled(graph_module, example_inputs, placement, settings, inductor)
    except torch_internals.RestartAnalysis:  # Dynamo traces the frame again
        raise
    except Exception as error:
        if placement.graph_module is graph_module:
            raise
        reason = f"Inductor failed on the graph after placement: {one_line(error)}"
        placement = untouched(graph_module, reason, placement.report)
    # Inductor may fail on what nobody writes, such as the place of the largest number of a linspace on the GPU.
    compiled = _compiled(graph_module, example_inputs, placement, settings, inductor)
    warnings.warn(f"Encore leaves a graph as it is; {placement.report.untouched}", stacklevel=2)
    return compiled


@functools.cache
def _warn_of_stock(reason: str) -> None:
    """Say once that graphs are compiled without Encore."""
    warnings.warn(f"Encore compiles with Inductor's own CUDA graphs: {reason}", stacklevel=3)


def _compiled(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    placement: Placement,
    settings: Options,
    inductor: dict[str, Any],
) -> Callable[..., Any]:
    """What Dynamo calls in place of the graph, which is compiled as it was placed."""
    inputs = placement.example_inputs(example_inputs)
    inductor = settings_for(placement.graph_module, inputs, inductor)
    entry = Entry(placement.report)
    inner_compile = with_corrected_pass(watching(torch_internals.compile_fx_inner, entry.compiled.append))
    maker = _maker(settings, inductor, entry)
    if maker is not None:
        inner_compile = asking(inner_compile, maker)
    lean = shortcuts(entry.note_shortcut) if settings.lean else contextlib.nullcontext()
    captured = contextlib.nullcontext() if maker is None else captured_by(maker)
    refused = contextlib.nullcontext() if maker is None else double_backwards_refused()
    with watched(entry.compiled.append), lean, refused, captured:
        compiled = torch_internals.compile_fx.compile_fx(
            placement.graph_module, inputs, inner_compile=inner_compile, config_patches=inductor
        )
    LEDGER.add(entry)
    if placement.feeds is not None:
        original = graph_module.forward
        feeds = Feeds(placement.feeds, original if placement.feeds.apart else None)
        _FEEDS.add(feeds)
        compiled = _fed(compiled, feeds, original)
    if not settings.lean:
        return compiled
    binding, entry.binding = _binding(graph_module)
    return compiled if binding is None else bound(compiled, binding)


def _settings_of(mode: str | None) -> Mapping[str, Any]:
    """Inductor's settings of one of its modes."""
    modes: Mapping[str, Mapping[str, Any]] = torch_internals.list_mode_options()
    if mode is not None and mode not in modes:
        raise WrongOption(f"mode {mode!r} is not one of Inductor's; allowed: {', '.join(map(repr, modes))}.")
    return modes[mode or "default"]


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options for Inductor by the names it has for them, which may be written with hyphens, as stock takes them.

    Raises:
        WrongOption: Inductor has no such option, or it has another type.
    """
    known = torch_internals.inductor_config.get_config_copy() if given else {}
    checked = {}
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
        checked[name] = value
    return checked


def _reset() -> None:
    """What `torch.compiler.reset` asks of a backend: free what its functions hold. Reports are kept.

    It ends stock's graphs of the calling thread. Encore's are ended if no other thread has any: that one may be in the
    middle of a replay.
    """
    release_bindings()
    maker = sys.modules.get("optimizations.trees.maker")  # not imported where no graph was ever made
    if maker is not None and not maker.containers.others_have_managers():
        maker.release_recordings()


encore.reset = _reset  # type: ignore[attr-defined]  # where Dynamo looks for it


def release_feeds() -> None:
    """Gives back the device memory of all hoisted values and staging buffers; the next calls allocate it again."""
    for feeds in _FEEDS.alive():
        feeds.release()


def _placed(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], settings: Options) -> Placement:
    """The graph after placement, or as it was: a program that stock compiles must not fail because of placement."""
    try:
        held_bytes = sum(feeds.device_bytes for feeds in _FEEDS.alive())
        return place(graph_module, example_inputs, settings, held_bytes=held_bytes)
    except Exception as error:
        reason = f"placement failed: {type(error).__name__}: {error}"
        warnings.warn(f"Encore leaves a graph as it is; {reason}. This is a defect of Encore.", stacklevel=2)
        return untouched(graph_module, reason)


def _binding(graph_module: torch.fx.GraphModule) -> tuple[Binding | None, BindingReport]:
    """What Dynamo's call does not pass; nothing, if a defect of Encore is in the way."""
    try:
        return bind(graph_module)
    except Exception as error:
        reason = f"binding failed: {type(error).__name__}: {error}"
        warnings.warn(f"Dynamo loads all parameters; {reason}. This is a defect of Encore.", stacklevel=2)
        return None, BindingReport(0, reason)


def _maker(settings: Options, inductor: Mapping[str, Any], entry: Entry) -> Maker | None:
    """Who makes the CUDA graphs; None for stock."""
    with torch_internals.inductor_config.patch(inductor):
        triton = torch_internals.inductor_config.triton
        stock = not triton.cudagraphs or not triton.cudagraph_trees
    if settings.indirection == "off" or stock:
        return None
    from optimizations.graph.plan import Choice
    from optimizations.trees.maker import EncoreMaker

    return EncoreMaker(
        Choice(settings.indirection),
        entry.functions.append,
        lean=settings.lean,
        selection=settings.selection,
        concurrency=settings.concurrency,
    )


def _fed(compiled: Callable[..., Any], feeds: Feeds, original: Callable[..., Any]) -> Callable[..., Any]:
    """The function Dynamo calls in place of the graph. A plain function: Dynamo wraps it and calls it by that.

    `original` is the graph before placement.
    """

    def as_it_was() -> bool:
        """Notes [Captures of the program's own] in `placement.feeds` and [Order of locks] in `calls.turns`."""
        return not resting() and (feeds.inside_a_capture() or (bool(LENT) and inside_a_function()))

    if not feeds.is_plain:
        compiled = torch_internals.innermost_fn(compiled)  # Dynamo keeps out of `run` already

        def run(*arguments: Any) -> Any:
            if as_it_was():
                return original(*arguments)
            return feeds.call(compiled, arguments)

        return run
    compiled_of_list = taking_a_list(compiled)

    def run_plainly(*arguments: Any) -> Any:
        if as_it_was():
            return original(*arguments)
        with feeds.turn:  # Note [Threads] in `placement.feeds`
            return compiled_of_list([*feeds.bind(arguments)])

    return run_plainly
