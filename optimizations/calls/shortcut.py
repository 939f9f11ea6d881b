"""Call graphs without AOTAutograd's and Inductor's wrappers.

Between the code that Dynamo generates and the function that launches, PyTorch 2.11 calls one wrapper inside another.
Each of them is there for programs that change their inputs, return views of them, are profiled and so on. For a graph
that does nothing of that, the wrappers are called until everything they do once is done; later calls go from the
outermost straight to the function that Inductor made (`CompiledFxGraph.current_callable`, looked up in each call). For
a trained graph AOTAutograd's autograd function stays between the two; see `trained`.

`LAYERS` lists what is avoided and why it may be. Three conditions must hold: this PyTorch's wrappers read exactly what
those of 2.11 read (`torch_internals.wrappers.as_checked`), the graph needs none of them (`needed`), and in each call
nothing is switched on that they look at (`_straight`).
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.calls import trained
from optimizations.report import ShortcutReport
from optimizations.torch_internals import wrappers
from optimizations.torch_internals.only_partition import Order, only_partition

FULL_CALLS = 3
"""Calls that take the slow path first: what wrappers do once they do in the first; warming up and recording follow."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Describe a wrapper that is skipped: where it is, what it does in PyTorch 2.11, and why a call may skip it."""

    name: str
    does: tuple[str, ...]
    why: tuple[str, ...]


LAYERS = (
    Layer(
        "torch._functorch.aot_autograd.aot_module_simplified.forward",
        ("puts the parameters of a graph module before the arguments, and makes a list of both",),
        ("Dynamo's graph modules have none; what fills in bound parameters has made a list (`calls.bound`)",),
    ),
    Layer(
        "torch._functorch._aot_autograd.runtime_wrappers._create_runtime_wrapper.runtime_wrapper",
        (
            "names its prologue in a profile",
            "keeps inputs that are changed or returned, and applies changes and views after the call",
            "counts up the versions of inputs that the graph changes",
            "watches custom operators for undeclared aliases in its first call",
            "switches gradients off for the call; on, for a trained graph",
            "detaches inputs that never need gradients, and has views tracked, for a trained graph",
            "marks outputs whose sizes differ from call to call",
            "sets the grad mode that the graph leaves behind",
        ),
        (
            "with a profiler on, calls go the full way",
            "only graphs without inputs that are changed behind the graph, or aliased outputs, have a shortcut",
            "the shortcut does the same",
            "the first calls go the full way",
            "the shortcut does the same",
            "the shortcut does the same",
            "only graphs without such outputs have a shortcut",
            "only graphs that leave it as it was have a shortcut",
        ),
    ),
    Layer(
        "torch._functorch._aot_autograd.utils.call_func_at_runtime_with_args",
        ("switches autocast off for the call if it was on at compile time", "makes a list of a tuple of outputs"),
        ("the shortcut does the same", "the shortcut does the same"),
    ),
    Layer(
        "torch._functorch._aot_autograd.utils.make_boxed_func.g",
        ("passes a list to an autograd function, one by one",),
        ("the shortcut does the same",),
    ),
    Layer(
        "torch.autograd.function.Function.apply",
        (
            "binds default arguments of a function that has a `setup_context`",
            "runs the function under functorch's transforms",
            "looks through all arguments for tensors that functorch left behind",
        ),
        (
            "AOTAutograd's have none",
            "while a transform is active, the function's own `apply` is called",
            "so does the first call; guards tell such tensors from others, by their keys (`calls.trained`)",
        ),
    ),
    Layer(
        "torch._functorch._aot_autograd.runtime_wrappers.AOTDispatchAutograd.post_compile.CompiledFunction",
        (
            "in a forward: hands in random states, and keeps them for the backward",
            "wraps results that alias others, and makes views of some again",
            "marks saved tensors whose sizes differ from call to call, and saves sizes",
            "looks whether what is saved are tensors",
            "saves tensors, marks results without gradients",
            "in a backward: compiles it, refuses to be differentiated again, and to be repeated where that is not safe",
        ),
        (
            "only for graphs without such states `calls.trained` takes its place",
            "only for graphs without such results",
            "only for graphs without such sizes",
            "PyTorch looks when they are saved",
            "`calls.trained` does the same",
            "such a backward goes to its own method",
        ),
    ),
    Layer(
        "torch._functorch._aot_autograd.runtime_wrappers._backward_prologue_functional",
        (
            "refuses to run under functorch's transforms, or with deterministic algorithms on that were off before",
            "picks out gradients of results that have one",
            "refuses subclasses of tensors that were not expected, and unwraps those that were",
            "brings gradients to the strides that the backward was compiled for",
        ),
        (
            "the backward's own method is called then, and refuses",
            "their places are known",
            "a gradient of another type goes to the backward's own method",
            "`calls.trained` does the same",
        ),
    ),
    Layer(
        "torch._functorch._aot_autograd.runtime_wrappers.SerializableCompiledFunction.__call__",
        ("carries what writes the function to AOTAutograd's cache",),
        ("calling it does nothing but call on",),
    ),
    Layer(
        "torch._functorch._aot_autograd.runtime_wrappers.FunctionalizedRngRuntimeWrapper.post_compile.wrapper",
        ("passes the state of random numbers to graphs that take it as an argument",),
        ("only graphs that take none have a shortcut",),
    ),
    Layer(
        "torch._functorch._aot_autograd.runtime_wrappers.EffectTokensWrapper.post_compile.inner_fn",
        ("passes tokens that keep operators with side effects in order",),
        ("only graphs without such tokens have a shortcut",),
    ),
    Layer(
        "torch._inductor.output_code.CompiledFxGraph.__call__",
        (
            "names the graph in a profile",
            "notes the order of graphs for Inductor's debugging output",
            "hands on metrics of kernels that were tuned at run time",
            "ends the bundle of tuning results of a compilation",
        ),
        (
            "with a profiler on, calls go the full way",
            "while this is noted, calls go the full way",
            "they are kept until a call that goes the full way, of any graph, hands them on; only logs show them",
            "the first calls go the full way, and bundles begin in compilations only",
        ),
    ),
    Layer(
        "torch._inductor.codegen.wrapper.PythonWrapperCodegen.codegen_partition_call",
        ("has generated code take arguments out of a list, and put them into another one for a partition",),
        ("where the code does nothing else, arguments that are bound are kept in the partition's order (`Ordered`)",),
    ),
)


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
def shortcuts(note: Callable[[ShortcutReport], None]) -> Iterator[None]:
    """Give the graphs that AOTAutograd finishes in the block a shortcut where possible; call `note` with a report each.

    Dynamo holds its compile lock meanwhile, so nothing else is compiled.
    """
    owner, attribute = torch_internals.holder_of("runtime_wrapper_post_compile")
    stock = getattr(owner, attribute)

    @functools.wraps(stock)
    def post_compile(wrapper: Any, compiled: Any, config: Any, *, runtime_metadata: Any) -> Any:
        full = stock(wrapper, compiled, config, runtime_metadata=runtime_metadata)
        reason = needed(runtime_metadata) or wrappers.changed_since_checked()
        function = wrappers.autograd_function(compiled) if wrapper.trace_joint else None
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
        tell_what_callers_get(graph, runtime_metadata.num_forward_returns)
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


def tell_what_callers_get(forward: Any, count: int) -> None:
    """Report to what makes CUDA graphs of a forward that callers get its first `count` results. Others are saved."""
    function, places = forward.current_callable, list(range(count))
    found = only_partition(forward)
    if found is not None:
        runner, order = found
        function, places = runner.partitions[0], [order.results[place] for place in places]
    if tell := getattr(function, "tell_what_callers_get", None):
        tell(frozenset(places))


class Ordered:
    """Call a graph with its arguments in the order of its one partition, for callers that have them in that order.

    `written`: arguments of the graph whose versions are counted up, since the graph writes them.

    Attributes:
        order: of the partition; None where the graph has none, or is not known to have one yet.
        call: takes the arguments in that order as a list, and empties it. To be called where `ready`.
    """

    def __init__(self, graph: Any, written: Sequence[int]) -> None:
        self._graph = graph
        self._written = written
        self._generated: Any = None
        self.order: Order | None = None
        self.call: Callable[[list[Any]], Any] | None = None

    def look(self, without_modes: Callable[[Callable[[list[Any]], Any], list[Any]], Any]) -> None:
        """Find out, once the graph's function is the one that it stays with."""
        found = only_partition(self._graph)
        if found is None:
            return
        runner, order = found
        if not set(self._written) <= set(order.arguments):  # it writes what its partition does not
            return
        results = None if order.results_as_given else order.results
        count_up = counting_up([order.arguments.index(index) for index in self._written])

        def call(arguments: list[Any]) -> Any:
            if count_up is not None:
                count_up(arguments)
            outputs = without_modes(runner.partitions[0], arguments)
            if len(outputs) != order.given:
                raise RuntimeError(f"a graph returned {len(outputs)} results, its source says {order.given}")
            return outputs if results is None else [outputs[place] for place in results]

        self._generated, self.order, self.call = self._graph.current_callable, order, call

    @property
    def ready(self) -> bool:
        """Return whether `call` may serve this call."""
        return (
            self.call is not None
            and self._graph.current_callable is self._generated
            and not torch_internals.autograd_profiler._is_profiler_enabled
            and not torch_internals.inductor_debug.RECORD_GRAPH_EXECUTION
        )


def counting_up(written: Sequence[int]) -> Callable[[list[Any]], None] | None:
    """Return a function that counts up the versions of these arguments of a call; None where there are none."""
    if not written:
        return None
    increment_version, chosen = torch.autograd.graph.increment_version, operator.itemgetter(*written)

    def count_up(arguments: list[Any]) -> None:
        increment_version(chosen(arguments))

    return count_up


def ordered_of(function: Any) -> Ordered | None:
    """Return the `Ordered` of `function`, for callers with another order; None if it is not the shortcut itself.

    AOTAutograd's wrappers around it have its attributes as well, and some take arguments that it does not: views of one
    memory, where it takes that memory. What carries it from a cache is looked through.
    """
    if type(function) is torch_internals.SerializableCompiledFunction:
        function = function.compiled_fn
    is_shortcut = getattr(function, "__code__", None) in _straight.__code__.co_consts
    return function.ordered if is_shortcut else None


def _straight(
    graph: Any, full: Callable[[list[Any]], Any], written: Sequence[int], *, autocast_off: bool
) -> Callable[[list[Any]], Any]:
    """Return the function called in place of `full`, AOTAutograd's wrapper around a `CompiledFxGraph`.

    `written`: arguments whose versions are counted up, since the graph writes them.

    Its attribute `ordered` serves callers that hold arguments in another order (`ordered_of`, for `calls.bound`).
    """
    profiler, debug = torch_internals.autograd_profiler, torch_internals.inductor_debug
    grad_enabled, set_grad_enabled = torch.is_grad_enabled, torch_internals.set_grad_enabled
    without_autocast = torch_internals.DisableAutocast
    full_calls = FULL_CALLS
    ordered = Ordered(graph, written)
    count_up = counting_up(written)

    def run(arguments: list[Any]) -> Any:
        nonlocal full_calls
        if full_calls or profiler._is_profiler_enabled or debug.RECORD_GRAPH_EXECUTION:
            full_calls = max(0, full_calls - 1)
            outputs = full(arguments)
            if not full_calls and ordered.order is None:
                ordered.look(without_modes)
            return outputs
        if count_up is not None:
            count_up(arguments)
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
