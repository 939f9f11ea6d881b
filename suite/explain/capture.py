"""Trace one call of a program with Dynamo; analyse and lower each FX graph.

Dynamo, AOTAutograd and Inductor run as they do under `torch.compile`. The program continues with fake tensors after
each graph, so that graphs after a break are traced as well, up to a value that is unknown without running it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import CodeType
from typing import Any

import torch

from models.nests import tensors_of
from optimizations import torch_internals
from optimizations.placement import Placement, place
from optimizations.stack_trace import Frame
from suite.explain.build import Program
from suite.explain.lowering import LoweringFailed, lower
from suite.explain.pretended_gpu import pretended_gpu
from suite.explain.records import TO_THE_END, FxGraph, GraphBreak, Lowering, NonStaticInput
from suite.measure.graphs import with_short_paths
from suite.measure.known_values import UnknownValue
from suite.measure.modes import GRAPH_MODE, MODES, PLACEMENT_MODE
from suite.measure.source_line import line_of_frame, short_path

SETTINGS: Mapping[str, Mapping[str, Any]] = {name: MODES[name].options for name in (GRAPH_MODE, "graph-unpartitioned")}
"""Inductor options of each lowering, by the mode that uses them; the first are stock PyTorch's."""

_GRADIENTS_LIMIT = (
    "gradients: graphs are lowered without autograd; backward graphs, what is kept for them, and what a workload does "
    "outside of its module (loss, optimizer) are not seen"
)
_BREAK_LIMIT = "what runs between FX graphs, and in functions that Dynamo leaves to Python, is not counted"
_NO_DRIVER = ("CUDA driver", "NVIDIA driver", "No CUDA GPUs")
"""Parts of PyTorch's error messages where it needs a GPU."""
_DRIVER_LIMIT = (
    "outside of FX graphs the program needs a GPU (cuDNN's recurrent layers do), and here is none; what comes after it "
    "is not seen"
)
_ONE_CALL_LIMIT = "one call is traced: what is compiled again for other shapes or values is not seen"


@dataclass(slots=True)
class TracedCall:
    """Collect the results of one call: FX graphs in Dynamo's order, breaks between them, and limits of the analysis.

    `calls` counts the calls of each graph. `failure` is the program's error, if any; results before it stay valid.
    `differentiated`: the call ran a backward itself.
    """

    graphs: list[FxGraph] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    failure: Exception | None = None
    seen: str | None = None
    differentiated: bool = False
    _modules: set[str] = field(default_factory=set)

    def note_modules(self, graph_module: torch.fx.GraphModule) -> None:
        """Record the modules whose operations are in a graph, by Dynamo's paths."""
        for node in graph_module.graph.nodes:
            for path, _ in (node.meta.get("nn_module_stack") or {}).values():
                self._modules.add("." + re.sub(r"\W+", ".", path.replace("_modules", "")).strip("."))

    def end(self, module: torch.nn.Module, cut: BaseException | None) -> None:
        """Describe how far the call of `module` was traced. `cut`: the reason why it ended early."""
        if cut is None:
            self.seen = TO_THE_END
            return
        place = user_place(cut)
        leaves = [name for name, member in module.named_modules() if name and next(member.children(), None) is None]
        unseen = [name for name in leaves if not any(_ends_alike(path, name) for path in self._modules)]
        after = f"; {len(unseen)} of {len(leaves)} layers after it are not" if unseen else ""
        self.seen = f"seen up to {place.partition(' in ')[0] if place else 'an unknown line'}{after}"


def _ends_alike(path: str, name: str) -> bool:
    """Return whether Dynamo's path may refer to this module: after a graph break it starts at an inner module."""
    tail = path.rpartition(".self.")[2]
    return bool(tail) and f".{name}".endswith(f".{tail}")


def capture(program: Program) -> TracedCall:
    """Trace one call of `program` and lower every FX graph for an H100 under each of `SETTINGS`, and after placement.

    Call it in a process that is used for nothing else, because of `pretended_gpu`.
    """
    found = TracedCall()
    torch_internals.reset_dynamo()
    reasons = torch_internals.dynamo_utils.graph_break_reasons
    with (
        pretended_gpu() as assumed,
        _functions_left_to_python(found.breaks),
        torch_internals.replaced("engine_run_backward", functools.partial(_gradients_of_inputs, program, found)),
        torch.set_grad_enabled(program.with_gradients),
        program.mode,
        program.surroundings(),
    ):
        cut: Exception | None = None
        call = torch.compile(program.module, backend=_backend(found))
        try:
            call(*program.args, **program.kwargs)
        except UnknownValue as error:
            found.limits.append(f"{error}; what comes after it is not seen: {user_place(error)}")
            cut = error
        except Exception as error:
            cut = error
            if any(words in str(error) for words in _NO_DRIVER):
                found.limits.append(f"{_DRIVER_LIMIT}: {user_place(error)}")
            else:
                found.failure = error
        found.end(program.module, cut)
        found.breaks.extend(
            GraphBreak(reason=_first_line(reason.reason), source_line=_innermost(reason.user_stack))
            for reason in reasons
        )
    found.limits.extend(assumed)
    found.limits.extend(
        f"graph {index} runs {count} times in the call, and is counted once"
        for index, count in enumerate(found.calls)
        if count > 1
    )
    if found.breaks:
        found.limits.append(_BREAK_LIMIT)
    if program.with_gradients and (not program.is_step or found.differentiated):
        found.limits.append(_GRADIENTS_LIMIT)
    found.limits.append(_ONE_CALL_LIMIT)
    return found


@contextlib.contextmanager
def _functions_left_to_python(breaks: list[GraphBreak]) -> Iterator[None]:
    """Record functions that Dynamo skips entirely, because it cannot resume after a break (for example in a loop)."""
    describe = torch_internals.describe_skipped_frame

    def noted(error: BaseException, code: CodeType, *arguments: Any) -> str:
        reason = f"{_first_line(str(error))}; {code.co_name} itself runs without graphs"
        breaks.append(GraphBreak(reason=reason, source_line=_innermost(getattr(error, "real_stack", ()))))
        description: str = describe(error, code, *arguments)
        return description

    with torch_internals.replaced("describe_skipped_frame", noted):
        yield


def _gradients_of_inputs(
    program: Program,
    found: TracedCall,
    outputs: Sequence[torch.Tensor],
    output_gradients: Any,
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[torch.Tensor] = (),
    *_: Any,
    **settings: Any,
) -> tuple[torch.Tensor, ...]:
    """Replace autograd's engine, which queries the driver for devices.

    `torch.autograd.grad` returns fake tensors like the inputs; nothing else is known of gradients.
    """
    found.differentiated = True
    if not any(output.requires_grad for output in outputs):
        raise RuntimeError("what is differentiated does not require gradients")
    if program.is_step and not inputs:
        for parameter in program.module.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        return ()
    if settings.get("accumulate_grad") or not inputs:
        raise UnknownValue("gradients are left in tensors during the call")
    return tuple(torch.empty_like(each, requires_grad=create_graph) for each in inputs)


def _backend(found: TracedCall) -> Callable[..., Any]:
    def collect(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with torch.no_grad():
            placement = place(graph_module, example_inputs)
            lowered, failures = _lowered(graph_module, example_inputs, placement)
            # Only now, because Dynamo may have to trace the frame again, and then this graph does not count.
            index = len(found.graphs)
            found.note_modules(graph_module)
            found.graphs.append(_graph(graph_module, index, placement, lowered))
        report = placement.report
        if report.device is None and not report.cpu_nodes_before and _has_cpu_values(graph_module):
            found.limits.append(f"graph {index}: where its values live is not known: {report.untouched}")
        found.limits.extend(_limits(index, lowered.get(GRAPH_MODE), failures))
        found.calls.append(0)

        def run(*args: Any) -> Any:
            found.calls[index] += 1
            return graph_module.forward(*args)

        return run

    return collect


def _lowered(
    graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], placement: Placement
) -> tuple[dict[str, Lowering], dict[str, str]]:
    """Lower a graph under each setting, and after placement under the options of stock CUDA graphs.

    Return the outcomes by setting, and the reasons for those that are missing. A graph that placement leaves untouched
    has stock's outcome.
    """
    lowered: dict[str, Lowering] = {}
    failures: dict[str, str] = {}
    for name in (*SETTINGS, PLACEMENT_MODE):
        module, inputs = graph_module, example_inputs
        if name == PLACEMENT_MODE:
            if placement.feeds is None and GRAPH_MODE in lowered:
                lowered[name] = lowered[GRAPH_MODE]
                continue
            module, inputs = placement.graph_module, placement.example_inputs(example_inputs)
        options = SETTINGS.get(name, MODES[GRAPH_MODE].options)
        try:
            lowered[name] = lower(module, inputs, options=options)
        except LoweringFailed as error:
            failures[name] = str(error)
    return lowered, failures


def _graph(
    graph_module: torch.fx.GraphModule, index: int, placement: Placement, lowered: Mapping[str, Lowering]
) -> FxGraph:
    """Return the record of Dynamo's graph number `index`."""
    stock = lowered.get(GRAPH_MODE)
    nodes = list(graph_module.graph.nodes)
    inputs = [_input(node) for node in nodes if _is_non_static_input(node)]
    return FxGraph(
        index=index,
        operations=sum(node.op.startswith("call_") for node in nodes),
        placement=with_short_paths(json.loads(json.dumps(asdict(placement.report)))),  # type: ignore[arg-type]
        non_static_inputs=inputs,
        non_static_input_bytes=sum(entry.input_bytes or 0 for entry in inputs),
        stock_captures=None if stock is None else _captures_all(stock),
        lowerings=[
            _named(name, one, bool(placement.report.staged) and name == PLACEMENT_MODE) for name, one in lowered.items()
        ],
    )


def _named(setting: str, lowering: Lowering, staging_copies: int) -> Lowering:
    copies = lowering.host_to_device_copies + staging_copies
    return lowering.model_copy(update={"setting": setting, "host_to_device_copies": copies})


def _has_cpu_values(graph_module: torch.fx.GraphModule) -> bool:
    noted = (node.meta.get("example_value") for node in graph_module.graph.nodes)
    return any(tensor.device.type == "cpu" for value in noted for tensor in tensors_of(value))


def _is_non_static_input(node: torch.fx.Node) -> bool:
    on_gpu = any(tensor.device.type == "cuda" for tensor in tensors_of(node.meta.get("example_value")))
    return node.op == "placeholder" and on_gpu and torch_internals.static_input_type(node) is None


def _input(node: torch.fx.Node) -> NonStaticInput:
    tensors = list(tensors_of(node.meta["example_value"]))
    static = all(isinstance(size, int) for tensor in tensors for size in tensor.shape)
    first = tensors[0]
    return NonStaticInput(
        node=node.name,
        shape=[int(size) for size in first.shape] if static else None,
        dtype=str(first.dtype).removeprefix("torch."),
        input_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors) if static else None,
    )


def _limits(index: int, stock: Lowering | None, failures: Mapping[str, str]) -> Iterator[str]:
    """Yield sentences on what is not known of graph number `index`."""
    for line in stock.takes_cpu_tensors if stock else ():
        yield (
            f"graph {index}: a CUDA graph would take a CPU tensor, and whether it can be recorded is not known: {line}"
        )
    for name, why in failures.items():
        yield f"graph {index} was not lowered for {name}: {why}"


def _captures_all(lowering: Lowering) -> bool | None:
    """Return whether all kernels are in CUDA graphs; None if it is unknown, or if there are none."""
    left = lowering.kernels_outside + lowering.cpu_kernels
    return left == 0 if left + lowering.kernels_in_graphs and not lowering.takes_cpu_tensors else None


def user_place(error: BaseException) -> str | None:
    """Return the user's line in which an error was raised; Dynamo's errors contain the traced stack."""
    return _innermost(getattr(error, "real_stack", ())) or _innermost(traceback.extract_tb(error.__traceback__))


def _innermost(stack: Sequence[traceback.FrameSummary]) -> str | None:
    own = "suite/"
    for frame in reversed(stack):
        if not short_path(frame.filename).startswith(("torch/", own, "<")):
            return line_of_frame(Frame(frame.filename, frame.lineno or 0, frame.name, frame.line or ""))
    return None


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else text
