"""Runs FX graphs that were made for a GPU on the CPU, with the aliasing they would have there.

A transfer between devices makes a copy; on one device it would make an alias. So every value that shares memory with an
operand here, although it did not on fake tensors, is copied.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.fx

from optimizations import Options, torch_internals
from optimizations.placement import Feeds, Placement, place
from optimizations.placement.feed_plan import FeedPlan
from optimizations.placement.observe import Observation, observe
from optimizations.placement.rewrite import copy_of
from optimizations.written_operands import tensors_in

CPU = torch.device("cpu")


class OnCpu(torch.fx.Interpreter):
    """Run a graph for the GPU on CPU tensors; `observation` has by node names which values share memory."""

    def __init__(self, graph_module: torch.fx.GraphModule, observation: Observation) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self.observation = observation

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if not n.op.startswith("call_") or not isinstance(value, torch.Tensor):
            return value
        operands = [(name.name, self.env[name]) for name in n.all_input_nodes]
        for name, operand in operands:
            alias_here = any(_same_memory(value, tensor) for tensor in tensors_in(operand))
            if alias_here and not self.observation.share_memory(n.name, name):
                return value.clone()
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(target, _on_cpu(args), _on_cpu(kwargs))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target == "cuda":
            return args[0].to(CPU)
        return super().call_method(target, _on_cpu(args), _on_cpu(kwargs))


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one.numel() > 0


def _on_cpu(value: Any) -> Any:
    def device(item: Any) -> Any:
        is_cuda = isinstance(item, (torch.device, str)) and str(item).startswith("cuda")
        return CPU if is_cuda else item

    return torch.fx.node.map_aggregate(value, device)


def runner(
    graph_module: torch.fx.GraphModule, inputs: Sequence[Any], interpreter: type[OnCpu] = OnCpu
) -> Callable[..., tuple[Any, ...]]:
    """A function that executes `graph_module` on CPU tensors; `inputs` describe its arguments as place() takes them."""
    return _run_by(interpreter, graph_module, observe(graph_module, list(inputs)))


def _run_by(
    interpreter: type[OnCpu], graph_module: torch.fx.GraphModule, observation: Observation
) -> Callable[..., tuple[Any, ...]]:
    return lambda *arguments: tuple(interpreter(graph_module, observation).run(*arguments, enable_io_processing=False))


def placed_runner(
    graph_module: torch.fx.GraphModule,
    placement: Placement,
    inputs: Sequence[Any],
    interpreter: type[OnCpu] = OnCpu,
) -> Callable[..., tuple[Any, ...]]:
    """The same for what placement made of `graph_module`: takes the original's arguments, and feeds it by `Feeds`."""
    run = runner(placement.graph_module, placement.example_inputs(inputs), interpreter)
    if placement.feeds is None:
        return run
    plan = feeds_on_cpu(graph_module, placement.feeds, inputs, interpreter)
    feeds = Feeds(plan, runner(graph_module, inputs, interpreter))
    return lambda *arguments: tuple(feeds.call(run, arguments))


def feeds_on_cpu(
    graph_module: torch.fx.GraphModule,
    plan: FeedPlan,
    inputs: Sequence[Any],
    interpreter: type[OnCpu] = OnCpu,
) -> FeedPlan:
    """Return the feed plan with the CPU as the device. What runs after the graph copies where it crosses devices.

    A part of the graph has the aliasing that its nodes, by their names, have in the whole.
    """
    if plan.after is None:
        return dataclasses.replace(plan, device=CPU)
    forward = _run_by(interpreter, plan.after.compute, observe(graph_module, list(inputs)))
    compute: Any = SimpleNamespace(forward=forward)
    return dataclasses.replace(plan, device=CPU, after=dataclasses.replace(plan.after, compute=compute))


def bits(value: Any) -> Any:
    """Return what two results must have in common to be equal bit for bit."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, tuple(value.shape), value.stride(), raw.numpy().tobytes()
    return [bits(item) for item in value] if isinstance(value, (list, tuple)) else value


def fake_cuda(tensor: torch.Tensor, mode: Any) -> torch.Tensor:
    """A fake tensor of `mode` on cuda:0, laid out as `tensor` is."""
    with mode:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda:0", requires_grad=tensor.requires_grad
        )


def graphs_of(
    program: Callable[..., Any], *args: Any, mode: Any = None, dynamic: bool | None = None
) -> list[tuple[torch.fx.GraphModule, list[Any]]]:
    """(graph module, example inputs) of each FX graph of one call, with fake tensors of `mode` or with real ones.

    On real CPU tensors the example inputs are what the same program for a GPU takes, value for value.
    """
    found: list[tuple[torch.fx.GraphModule, list[Any]]] = []

    def collect(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append((graph_module, list(example_inputs)))
        return graph_module.forward

    torch_internals.reset_dynamo()
    with mode or contextlib.nullcontext():
        torch.compile(program, backend=collect, dynamic=dynamic)(*args)
    return found


@dataclasses.dataclass(frozen=True)
class Traced:
    """Hold the graph of a program for a GPU, its example inputs, and what placement made of it."""

    graph_module: torch.fx.GraphModule
    inputs: list[Any]
    placement: Placement

    def original(self) -> Callable[..., tuple[Any, ...]]:
        return runner(self.graph_module, self.inputs)

    def placed(self) -> Callable[..., tuple[Any, ...]]:
        return placed_runner(self.graph_module, self.placement, self.inputs)

    def feeds(self) -> FeedPlan:
        """The feed plan, with the CPU as the device."""
        assert self.placement.feeds is not None
        return feeds_on_cpu(self.graph_module, self.placement.feeds, self.inputs)

    def arguments(self, default: Any = None, **values: Any) -> list[Any]:
        """The graph's arguments in order: `values` by the names that the program has for them, else the default."""
        names = [node.name for node in self.graph_module.graph.nodes if node.op == "placeholder"]
        return [next((value for key, value in values.items() if f"_{key}_" in f"{name}_"), default) for name in names]


def traced(
    program: Callable[..., Any],
    *tensors: Any,
    on_cpu: Sequence[int] = (),
    options: Options = Options(),  # noqa: B008
    dynamic: bool | None = None,
) -> Traced:
    """Trace and place a program on fake CUDA tensors, but for those at `on_cpu`. A module's parameters are fake too."""
    mode = torch_internals.FakeTensorMode(allow_non_fake_inputs=True)
    arguments = [tensor if place in on_cpu else fake_cuda(tensor, mode) for place, tensor in enumerate(tensors)]
    on_gpu = on_cuda(program, mode) if isinstance(program, torch.nn.Module) else program
    ((graph_module, inputs),) = graphs_of(on_gpu, *arguments, mode=mode, dynamic=dynamic)
    return Traced(graph_module, inputs, place(graph_module, inputs, options))


def on_cuda(module: torch.nn.Module, mode: Any) -> torch.nn.Module:
    """`module` with its parameters and buffers replaced by fake CUDA tensors; other attributes stay on the CPU."""
    for child in module.modules():
        for table in _tables(child):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    fake = fake_cuda(tensor.detach(), mode)
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    table[name] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    return module


def _tables(module: torch.nn.Module) -> Iterable[dict[str, Any]]:
    return vars(module)["_parameters"], vars(module)["_buffers"]


def retargeted(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of a graph for the GPU that works on CPU tensors, for programs that write to nothing."""
    copy = copy_of(graph_module)
    for node in copy.graph.nodes:
        if node.op == "call_method" and node.target == "cuda":
            node.target, node.args = "to", (node.args[0], CPU)
        node.args, node.kwargs = _on_cpu(node.args), _on_cpu(node.kwargs)
        node.meta.pop("example_value", None)
    copy.recompile()
    return copy
