"""Call graphs without AOTAutograd's and Inductor's wrappers.

Between the code that Dynamo generates and the function that launches, PyTorch 2.11 has several nested wrappers. They
handle programs that change their inputs, return views of them, are profiled and so on. For a graph that needs none of
this, the wrappers are called until their one-time work is done. Later calls go from the outermost wrapper directly to
Inductor's function (`CompiledFxGraph.current_callable`, looked up in each call). For a trained graph, AOTAutograd's
autograd function stays between the two; see `trained`.

Three conditions must hold: this is PyTorch 2.11, whose wrappers are supported (`wrappers.unknown_wrappers`), the graph
needs none of them (`needed`), and no mode that they handle is enabled in the call (`_straight`).

Note [Wrappers that are skipped]. From the outermost to the innermost:

* `aot_module_simplified.forward` makes a list of the graph module's parameters and the arguments; Dynamo's graphs have
  no parameters.
* `runtime_wrapper` keeps inputs that are changed or returned, applies changes and views after the call, and marks
  sizes of outputs: only graphs without these have a shortcut. It increments versions, detaches inputs, tracks views and
  switches gradients, as the shortcut does. It searches for undeclared aliases in its first call, which has no shortcut.
* `call_func_at_runtime_with_args` disables autocast, and converts tuples to lists, as the shortcut does.
* `Function.apply` binds defaults, which AOTAutograd's functions do not have, and handles functorch's transforms and
  their dead wrappers, for which `trained` calls it.
* `CompiledFunction` saves tensors, marks results, and compiles the backward; see `trained`, which calls it for random
  states, aliases, saved sizes, second derivatives and tensor subclasses.
* `SerializableCompiledFunction` carries a function to AOTAutograd's cache. The wrappers for random states and effect
  tokens pass these on: only graphs that have none have a shortcut.
* `CompiledFxGraph.__call__` names the graph in a profile and notes its order for Inductor's debugging output: with
  these enabled, calls take the slow path. It also reports metrics of kernels that were tuned at run time, which wait
  for the next call on the slow path.
* `codegen_partition_call` moves arguments from one list to another: see `Ordered`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.calls import trained
from optimizations.calls.double_backward import refuse_double_backwards
from optimizations.report import ShortcutReport
from optimizations.torch_internals import wrappers
from optimizations.torch_internals.only_partition import Order, only_partition

FULL_CALLS = 3
"""The first calls take the slow path: the wrappers' one-time work, warming up and recording."""


def needed(metadata: Any) -> str | None:
    """Return why a graph needs AOTAutograd's wrapper in each call, or None: from the metadata of a `RuntimeWrapper`."""
    if metadata.num_mutated_inp_runtime_indices:
        return "the graph changes inputs"
    if metadata.num_outputs_aliased or metadata.num_intermediate_bases:
        return "outputs share memory with inputs or with each other"
    if metadata.dynamic_outputs:
        return "sizes of outputs differ from call to call"
    if metadata.is_rng_op_functionalized:
        return "the state of random numbers is an argument"
    if metadata.tokens:
        return "operators with side effects are kept in order"
    if metadata.grad_enabled_mutation is not None:
        return "the graph changes the grad mode"
    return None


@contextlib.contextmanager
def finishing(
    note: Callable[[ShortcutReport], None] | None, forward_returns: Callable[[int], None] | None
) -> Iterator[None]:
    """Change graphs that AOTAutograd finishes in the block.

    Dynamo holds its compile lock meanwhile, so nothing else is compiled.

    Args:
        note: graphs get a shortcut if possible, and `note` is called with a report for each.
        forward_returns: graphs refuse double backwards, and this is called with the number of each forward's results
            that callers get; the others are saved.
    """
    owner, attribute = torch_internals.holder_of("runtime_wrapper_post_compile")
    stock = getattr(owner, attribute)

    @functools.wraps(stock)
    def post_compile(wrapper: Any, compiled: Any, config: Any, *, runtime_metadata: Any) -> Any:
        function = wrappers.autograd_function(compiled) if wrapper.trace_joint else None
        if function is not None and forward_returns is not None:
            refuse_double_backwards(function)
            forward_returns(runtime_metadata.num_forward_returns)
        full = stock(wrapper, compiled, config, runtime_metadata=runtime_metadata)
        if note is None:
            return full
        reason = needed(runtime_metadata) or wrappers.unknown_wrappers()
        graph = wrappers.graph_inside(compiled if function is None else function.compiled_fw)
        if reason is None and graph is None:
            reason = "other wrappers stand between AOTAutograd and Inductor (for tensor subclasses)"
        if reason is None and wrapper.trace_joint and wrappers.disables_hooks_of_saved_tensors(full):
            reason = "hooks of saved tensors are compiled in"
        note(ShortcutReport(reason))
        if reason is not None:
            return full
        written: Sequence[int] = ()
        if config.keep_inference_input_mutations:
            written = runtime_metadata.mutated_graph_handled_indices_seen_by_autograd
        if function is None:
            return functools.wraps(full)(_straight(graph, full, written, autocast_off=wrapper.disable_amp))
        straight = trained.straight_to(
            function,
            full,
            full_calls=FULL_CALLS,
            written=written,
            detached=wrapper.indices_of_inps_to_detach,
            autocast_off=wrapper.disable_amp,
        )
        return functools.wraps(full)(straight)

    with torch_internals.replaced("runtime_wrapper_post_compile", post_compile):
        yield


class Ordered:
    """Call a graph with its arguments in the order of its one partition, for callers that have them in that order.

    `written`: arguments of the graph whose versions are incremented, because the graph writes them.

    Attributes:
        order: the order of the partition; None if the graph has none, or is not examined yet.
        call: takes the arguments in that order as a list, and empties it. Call it only if `ready`.
    """

    def __init__(self, graph: Any, written: Sequence[int]) -> None:
        self._graph = graph
        self._written = written
        self._generated: Any = None
        self.order: Order | None = None
        self.call: Callable[[list[Any]], Any] | None = None

    def look(self, without_modes: Callable[[Callable[[list[Any]], Any], list[Any]], Any]) -> None:
        """Determine the order once the graph's function is final."""
        found = only_partition(self._graph)
        if found is None:
            return
        runner, order = found
        if not set(self._written) <= set(order.arguments):  # it writes what its partition does not
            return
        results = None if order.results == tuple(range(order.given)) else order.results
        written = [order.arguments.index(index) for index in self._written]
        increment_version = torch.autograd.graph.increment_version

        def call(arguments: list[Any]) -> Any:
            if written:
                increment_version([arguments[place] for place in written])
            outputs = without_modes(runner.partitions[0], arguments)
            if len(outputs) != order.given:
                raise RuntimeError(f"a graph returned {len(outputs)} results, its source says {order.given}")
            return outputs if results is None else [outputs[place] for place in results]

        self._generated, self.order, self.call = self._graph.current_callable, order, call

    @property
    def ready(self) -> bool:
        """Return whether `call` may run this call."""
        return (
            self.call is not None
            and self._graph.current_callable is self._generated
            and not torch_internals.autograd_profiler._is_profiler_enabled
            and not torch_internals.inductor_debug.RECORD_GRAPH_EXECUTION
        )


def ordered_of(function: Any) -> Ordered | None:
    """Return the `Ordered` of `function`, for callers with the partition's order; None if it is not the shortcut.

    AOTAutograd's wrappers around the shortcut copy its attributes, and some take other arguments: views of one memory
    in place of that memory. The wrapper that carries it from a cache is skipped.
    """
    if type(function) is torch_internals.SerializableCompiledFunction:
        function = function.compiled_fn
    is_shortcut = getattr(function, "__code__", None) in _straight.__code__.co_consts
    return function.ordered if is_shortcut else None


def _straight(
    graph: Any, full: Callable[[list[Any]], Any], written: Sequence[int], *, autocast_off: bool
) -> Callable[[list[Any]], Any]:
    """Return the function called in place of `full`, AOTAutograd's wrapper around a `CompiledFxGraph`.

    `written`: arguments whose versions are incremented, because the graph writes them.

    Its attribute `ordered` is for callers with arguments in the partition's order (`ordered_of`, for `calls.bound`).
    """
    profiler, debug = torch_internals.autograd_profiler, torch_internals.inductor_debug
    grad_enabled, set_grad_enabled = torch.is_grad_enabled, torch_internals.set_grad_enabled
    without_autocast, increment_version = torch_internals.DisableAutocast, torch.autograd.graph.increment_version
    full_calls = FULL_CALLS
    ordered = Ordered(graph, written)

    def run(arguments: list[Any]) -> Any:
        nonlocal full_calls
        if full_calls or profiler._is_profiler_enabled or debug.RECORD_GRAPH_EXECUTION:
            full_calls = max(0, full_calls - 1)
            outputs = full(arguments)
            if not full_calls and ordered.order is None:
                ordered.look(without_modes)
            return outputs
        if written:
            increment_version([arguments[index] for index in written])
        return without_modes(graph.current_callable, arguments)

    def without_modes(function: Callable[[list[Any]], Any], arguments: list[Any]) -> Any:
        if autocast_off:
            with without_autocast():
                return without_gradients(function, arguments)
        if grad_enabled():
            return without_gradients(function, arguments)
        outputs = function(arguments)
        return list(outputs) if isinstance(outputs, tuple) else outputs

    def without_gradients(function: Callable[[list[Any]], Any], arguments: list[Any]) -> Any:
        before = grad_enabled()
        try:  # an interrupt may come right after any call
            set_grad_enabled(False)
            outputs = function(arguments)
        finally:
            set_grad_enabled(before)
        return list(outputs) if isinstance(outputs, tuple) else outputs

    run.ordered = ordered  # type: ignore[attr-defined]
    return run
