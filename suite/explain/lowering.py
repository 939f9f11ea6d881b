"""Run Inductor's whole lowering of one FX graph without a GPU, and without compiling or running its kernels.

A Dynamo backend calls `lower` instead of Inductor, inside `pretended_gpu`. AOTAutograd, Inductor's passes, scheduling
and code generation run unchanged. Replaced are the last step (loading the generated module) and the step after it
(recording CUDA graphs), which here only notes the partitions to record. The outcome contains the generated source, in
which `generated_code` counts kernels.

Graphs are lowered without autograd: AOTAutograd differentiates while it traces a backward, and PyTorch's engine queries
the driver for streams.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.torch_internals import outcome
from suite.explain.generated_code import Body, read_module
from suite.explain.records import Lowering
from suite.measure.source_line import Reasons, line_of_frame

FIXED_OPTIONS: Mapping[str, Any] = {
    # Each lowering must generate its module in this process, without caches and compile workers.
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "compile_threads": 1,
}
"""Inductor settings that every offline lowering needs; none of them changes the generated code."""


class LoweringFailed(Exception):
    """Report that Inductor could not lower the graph offline, with the first line of Inductor's message."""


def lower(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any]) -> Lowering:
    """Lower a graph as Dynamo passes it to a backend, without changing it, while gradients are disabled.

    Args:
        graph_module: the FX graph, with its fake inputs in `example_inputs`.
        options: Inductor settings as given to `torch.compile(options=...)`.

    Raises:
        LoweringFailed: Inductor raised an error.
        Exception: Dynamo's signal to trace the frame again, which must propagate to Dynamo.
    """
    seen = _Seen()
    work = _copied(graph_module)
    settings = {**FIXED_OPTIONS, **options}
    with (
        torch_internals.inductor_config.patch(settings),
        torch_internals.functorch_config.patch(enable_autograd_cache=False),
        torch_internals.replaced("engine_run_backward", seen.differentiate),
        # Inductor queries the C++ compiler for its version and vector instructions; none need be installed.
        torch_internals.replaced("get_cpp_compiler", lambda: "g++"),
        torch_internals.replaced("valid_vec_isa_list", list),
        _observed(seen),
    ):
        try:
            torch_internals.compile_fx.compile_fx(work, list(example_inputs))
        except torch_internals.RestartAnalysis:
            raise
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            raise LoweringFailed(f"{type(error).__name__}: {first_line}") from error
    if seen.differentiates:
        raise LoweringFailed("gradients inside of a graph, as of torch.func.grad, are not computed without a GPU")
    return seen.lowered()


@contextlib.contextmanager
def _observed(seen: _Seen) -> Iterator[None]:
    """Replace Inductor's loading of modules and recording of graphs, and store the outcome."""
    with (
        torch_internals.replaced("compile_to_module_lines", lambda graph, code: seen.load(graph, code)),  # a method
        torch_internals.replaced("cudagraphify", seen.record),
        outcome.watched(lambda graph, _: seen.reasons.add_graph(graph)),
    ):
        yield


@dataclass(slots=True)
class _Seen:
    """Collect the outcome of one graph."""

    sources: list[str] = field(default_factory=list)
    reasons: Reasons = field(default_factory=Reasons)
    recorded: list[int] = field(default_factory=list)
    takes_cpu_tensors: dict[str, None] = field(default_factory=dict)
    differentiates: bool = False
    _partition: int = -1

    def differentiate(
        self,
        outputs: Any,
        gradients: Any,
        retain: bool,
        create: bool,
        inputs: Sequence[torch.Tensor],
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Return tensors in place of gradients. An error here would leave `torch.func` in the middle of a transform."""
        self.differentiates = True
        return tuple(torch.empty_like(each) for each in inputs)

    def load(self, graph: Any, wrapper_code: Any) -> Any:
        """Store the generated source, and return a module that cannot be called."""
        self.sources.append(wrapper_code.value)
        self.note_cpu_inputs(graph)
        runner = SimpleNamespace(partitions=[], recursively_apply_fns=self.record_partitions)
        return SimpleNamespace(call=_never_called, runner=runner, __file__="<not loaded>")

    def note_cpu_inputs(self, graph: Any) -> None:
        """Return operations in partitions that read a CPU tensor."""
        if not torch_internals.inductor_config.graph_partition:
            return
        for node in graph.scheduler.nodes:
            launches = not isinstance(node, torch_internals.NopKernelSchedulerNode)
            if not launches or graph.scheduler.should_partition(node) is not None:
                continue
            if any(_is_cpu_data(graph.try_get_buffer(read.name)) for read in node.read_writes.reads):
                frame = outcome.scheduled_frame(node)
                self.takes_cpu_tensors[node.get_name() if frame is None else line_of_frame(frame)] = None

    def record_partitions(self, record: Sequence[Callable[[Any], Any]]) -> None:
        for self._partition, function in enumerate(record):
            function(_never_called)

    def record(
        self,
        model: Callable[..., Any],
        static_input_idxs: Sequence[int] = (),
        *,
        placeholders: Sequence[Any] = (),
        mutated_input_idxs: Sequence[int] = (),
        **ignored: Any,
    ) -> Callable[..., Any]:
        """Replace the recording of a CUDA graph, of the whole module or of one partition."""
        # Stock PyTorch checks this at the first call, and then does not capture the whole function. It accepts inputs
        # that are outputs of an earlier CUDA graph; these are known only at run time, so here no input counts as one.
        mutated = [index for index in mutated_input_idxs if index not in static_input_idxs]
        if mutated:
            message = torch_internals.cudagraph_utils.get_mutation_stack_trace(placeholders, mutated)
            self.reasons.add(outcome.in_words(message))
        else:
            self.recorded.append(self._partition)
        return model

    def lowered(self) -> Lowering:
        source = "\n".join(self.sources)
        bodies = read_module(source)
        recorded = {place % len(bodies) for place in self.recorded}  # -1 is the whole of `call`
        inside = sum((bodies[place] for place in recorded), Body())
        outside = sum((body for place, body in enumerate(bodies) if place not in recorded), Body())
        return Lowering(
            partitions=len(self.recorded),
            kernels_in_graphs=inside["gpu_kernels"],
            kernels_outside=outside["gpu_kernels"],
            cpu_kernels=outside["cpu_kernels"],
            host_to_device_copies=outside["host_to_device_copies"],
            blocking_copies=outside["blocking_copies"],
            not_captured=self.reasons.records(),
            takes_cpu_tensors=tuple(self.takes_cpu_tensors),
            source=source,
        )


def _is_cpu_data(buffer: Any) -> bool:
    """Return whether a buffer of Inductor's is a CPU tensor that cannot be passed by value."""
    device = None if buffer is None else buffer.get_device()
    return device is not None and device.type == "cpu" and len(buffer.get_size()) > 0


def _copied(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy that Inductor may change, with Dynamo's attributes of module and nodes: the inputs' sources."""
    copied = torch.fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    copied.meta = dict(graph_module.meta)
    torch_internals.copy_notes(graph_module, copied)
    for node, twin in zip(graph_module.graph.nodes, copied.graph.nodes, strict=True):
        torch_internals.copy_notes(node, twin)
    return copied


def _never_called(*arguments: Any) -> Any:
    raise AssertionError("a graph that was lowered offline cannot run")
