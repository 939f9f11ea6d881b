"""Trace one call of a program with Dynamo; analyse and lower each FX graph.

Dynamo, AOTAutograd and Inductor run as they do under `torch.compile`. The program continues with fake tensors after
each graph, so that graphs after a break are traced as well, up to a value that is unknown without running it.
"""

from __future__ import annotations

import contextlib
import functools
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.placement import place
from optimizations.stack_trace import Frame
from suite.explain.build import Program
from suite.explain.fx_graph import lower_placed, placed, read_fx_graph
from suite.explain.generated_code import Body
from suite.explain.lowering import LoweredGraph, LoweredPair, LoweringFailed, lower
from suite.explain.pretended_gpu import TARGET, pretended_gpu
from suite.explain.records import TO_THE_END, FxGraph, GraphBreak, Lowering
from suite.measure.known_values import UnknownValue
from suite.measure.modes import GRAPH_MODE, MODES, PLACEMENT_MODE
from suite.measure.source_line import line_of_frame, short_path

SETTINGS: Mapping[str, Mapping[str, Any]] = {name: MODES[name].options for name in (GRAPH_MODE, "graph-unpartitioned")}
"""Inductor options of each lowering, by the mode that uses them; the first are stock PyTorch's."""

_TRAINING_LIMIT = (
    "training: backward graphs are lowered as if every output gets a gradient; what runs between forward and backward, "
    "such as the loss, and the optimizer are not seen"
)
_STEP_LIMIT = (
    "the step: backward graphs are lowered as if every output gets a gradient, and every parameter has one afterwards"
)
_GRADIENTS_LIMIT = (
    "the call differentiates: graphs are seen, lowered without autograd; backward graphs, and what is kept for them, "
    "are not"
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

    `calls` counts the calls of each graph. `lowered` has Inductor's outcome for each graph, by setting. `failure` is
    the program's error, if any; results before it stay valid. `differentiated`: the call ran a backward itself.
    """

    graphs: list[FxGraph] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    lowered: list[dict[str, LoweredPair]] = field(default_factory=list)
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


def capture(program: Program, settings: Mapping[str, Mapping[str, Any]] = SETTINGS) -> TracedCall:
    """Trace one call of `program` and lower every FX graph for an H100 under each of `settings`, and after placement.

    Without settings nothing is lowered: graphs, CPU values, copies and breaks are found, which is quick.
    Call it in a process that is used for nothing else, because of `pretended_gpu`.
    """
    found = TracedCall()
    torch_internals.reset_dynamo()
    reasons = torch_internals.dynamo_utils.graph_break_reasons
    with (
        pretended_gpu() as assumed,
        _functions_left_to_python(found.breaks),
        torch_internals.replaced("engine_run_backward", functools.partial(_gradients_of_inputs, program, found)),
        torch.set_grad_enabled(program.differentiates or program.training),
        program.mode,
        program.surroundings(),
    ):
        cut: Exception | None = None
        call = torch.compile(program.module, backend=_backend(found, settings, training=program.training))
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
    if program.differentiates:
        found.limits.append(_GRADIENTS_LIMIT)
    if program.is_step and not found.differentiated and found.failure is None:
        # A call without a backward counts as inference, although the program might train.
        found.lowered = [
            {name: LoweredPair(pair.forward) for name, pair in lowered.items()} for lowered in found.lowered
        ]
    elif program.training:
        found.limits.append(_STEP_LIMIT if program.is_step else _TRAINING_LIMIT)
    found.graphs = [
        _with_lowerings(graph, lowered, next(iter(settings), ""))
        for graph, lowered in zip(found.graphs, found.lowered, strict=True)
    ]
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


def _backend(found: TracedCall, settings: Mapping[str, Mapping[str, Any]], *, training: bool) -> Callable[..., Any]:
    def collect(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        # Code that runs without gradients, such as an optimizer, has no backward graph in training either.
        lower_one = functools.partial(lower, training=training and torch.is_grad_enabled())
        with torch.no_grad():
            return collect_lowered(graph_module, example_inputs, lower_one)

    def collect_lowered(
        graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], lower_one: Callable[..., LoweredPair]
    ) -> Callable[..., Any]:
        lowered: dict[str, LoweredPair] = {}
        failures: dict[str, str] = {}
        placement = place(graph_module, example_inputs)
        for name in (*settings, PLACEMENT_MODE) if settings else ():
            try:
                if name == PLACEMENT_MODE:
                    lowered[name] = lower_placed(placement, example_inputs, lowered.get(GRAPH_MODE), lower_one)
                else:
                    lowered[name] = lower_one(graph_module, example_inputs, options=settings[name])
            except LoweringFailed as error:
                failures[name] = str(error)
        # Only now, because Dynamo may have to trace the frame again, and then this graph does not count.
        index = len(found.graphs)
        found.note_modules(graph_module)
        record, unknown = read_fx_graph(graph_module, example_inputs, index)
        if unknown is not None:
            found.limits.append(f"graph {index}: where its values live is not known: {unknown}")
        stock = lowered.get(next(iter(settings), ""))
        found.graphs.append(record.model_copy(update={"placement": placed(graph_module, placement.report)}))
        found.lowered.append(lowered)
        found.limits.extend(
            f"{which}: a CUDA graph would take a CPU tensor, and whether it can be recorded is not known: {line}"
            for which, graph in _parts(stock, index)
            for line in graph.takes_cpu_tensors
        )
        found.limits.extend(f"graph {index} was not lowered for {name}: {why}" for name, why in failures.items())
        missing: dict[str, list[str]] = {}
        for name, pair in lowered.items():
            if pair.no_backward is not None:
                missing.setdefault(pair.no_backward, []).append(name)
        found.limits.extend(
            f"the backward of graph {index} was not lowered for {', '.join(names)}: {why}"
            for why, names in missing.items()
        )
        found.calls.append(0)

        def run(*args: Any) -> Any:
            found.calls[index] += 1
            return graph_module.forward(*args)

        return run

    return collect


def _with_lowerings(graph: FxGraph, lowered: Mapping[str, LoweredPair], stock: str) -> FxGraph:
    backwards = {name: pair.backward for name, pair in lowered.items() if pair.backward is not None}
    staged = 0 if graph.placement is None else graph.placement.copies - graph.placement.blocking_copies
    return graph.model_copy(
        update={
            "lowerings": [
                _lowering(name, pair.forward, staged * (name == PLACEMENT_MODE)) for name, pair in lowered.items()
            ],
            "backward": [_lowering(name, backward) for name, backward in backwards.items()],
            "stock_captures": _captures_all(lowered[stock]) if stock in lowered else None,
        }
    )


def _parts(pair: LoweredPair | None, index: int) -> Iterator[tuple[str, LoweredGraph]]:
    """Yield forward and backward of Dynamo's graph number `index`, with their names."""
    if pair is not None:
        yield f"graph {index}", pair.forward
        if pair.backward is not None:
            yield f"the backward of graph {index}", pair.backward


def _lowering(setting: str, graph: LoweredGraph, staging_copies: int = 0) -> Lowering:
    inside, outside = graph.in_graphs, graph.outside
    return Lowering(
        setting=setting,
        target=TARGET,
        partitions=graph.graphs,
        kernels_in_graphs=inside.gpu_kernels,
        kernels_outside=outside.gpu_kernels,
        cpu_kernels=outside.cpu_kernels,
        host_to_device_copies=outside.host_to_device_copies + staging_copies,
        blocking_copies=outside.blocking_copies,
        not_captured=list(graph.not_captured),
    )


def _captures_all(pair: LoweredPair) -> bool | None:
    graphs = [graph for _, graph in _parts(pair, 0)]
    if any(graph.takes_cpu_tensors for graph in graphs):
        return None
    outside = sum((graph.outside for graph in graphs), Body())
    left = outside.gpu_kernels + outside.cpu_kernels
    if left == 0 and pair.no_backward is not None:
        return None
    return left == 0 if left + sum(graph.in_graphs.gpu_kernels for graph in graphs) else None


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
