"""Run an FX graph on fake tensors and record what every node really does: values, aliases, writes, operators.

Dynamo's graphs hold Python-level calls (`operator.add`, `Tensor.to`, user operators), and no table of such names could
show which of them alias, mutate, draw random numbers or read values. So the graph is executed once without data, and
the operators that each node dispatches to answer these questions through their schemas and tags.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from optimizations import torch_internals
from optimizations.placement.operators import (
    OTHER_MEMORY,
    STRIDED,
    awaited_transfer,
    gpu_obstacle,
    needs_values,
)
from optimizations.torch_internals.geometry import is_lazy_view
from optimizations.written_operands import tensors_in, written

_STREAM_METHODS = frozenset(
    ("synchronize", "query", "wait", "wait_stream", "wait_event", "record", "record_event", "record_stream")
)
"""Methods of streams and events, and the method of tensors that names a stream."""


class CannotObserve(RuntimeError):
    """The graph cannot be run on fake tensors, or does what such a run would not show. `node` is where."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"{node}: {reason}")
        self.node = node
        self.reason = reason


@dataclass(slots=True)
class Effects:
    """Record what one node does beyond computing its value. Storages are numbered as in `Observation`.

    `opaque` says why the node's effects cannot be known; `gpu_obstacle` why its CPU operands cannot be GPU tensors.
    `awaited`: it does not leave a copy of a CPU operand to the GPU to be awaited by others.
    """

    writes: set[int] = field(default_factory=set)
    host_reads: set[int] = field(default_factory=set)
    awaited: bool = False
    random_on_cpu: bool = False
    opaque: str | None = None
    gpu_obstacle: str | None = None


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Record a tensor's metadata at the time its node was done. Sizes and strides may be symbolic."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    storage: int
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Observation:
    """Hold the records of one run. Keys are node names; `storages` maps a storage to the device it is on.

    `values` are fake tensors (and symbolic numbers) of `mode`; inputs that share memory are given one storage number.
    """

    mode: Any
    values: Mapping[str, Any]
    tensors: Mapping[str, tuple[TensorFacts, ...]]
    effects: Mapping[str, Effects]
    storages: Mapping[int, torch.device]

    def share_memory(self, one: str, other: str) -> bool:
        """Return whether the values of two nodes have a storage in common."""
        storages = {facts.storage for facts in self.tensors[one]}
        return any(facts.storage in storages for facts in self.tensors[other])


def observe(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    same_memory_as: Sequence[Any] | None = None,
    mode: Any = None,
) -> Observation:
    """Run `graph_module` on tensors without data.

    `inputs` give their layouts: fake or real tensors, symbolic or plain numbers. `same_memory_as` are the tensors that
    tell which inputs share memory (by default `inputs` themselves). `mode` is the one of an earlier observation of a
    graph with the same symbols, if there was one.

    Raises:
        CannotObserve: some node does not run that way; the message names it.
    """
    for node in graph_module.graph.nodes:
        # Before anything is run: they change state of the process, and a run that breaks off would leave it so.
        if node.op == "call_function" and _is_functorch(node.target):
            raise CannotObserve(node.name, "function transforms change what all other nodes mean")
        if node.op == "call_function" and _changes_state(node.target):
            raise CannotObserve(node.name, "changes what the operations after it do")
        if _orders_streams(node):
            raise CannotObserve(node.name, "orders the host's work and the GPU's, of which nothing else here tells")
    if not torch.cuda.is_available():
        # PyTorch's own guard for tracing CUDA programs without a device; without it, indexing calls the driver.
        torch_internals.ensure_cuda_device_guard_set()
    shape_env = mode.shape_env if mode is not None else _shape_env(inputs)
    mode = mode or torch_internals.FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_global_state_kept())
        if shape_env is not None:
            # Dynamo has guarded on all that this run decides; its own symbols for data-dependent sizes stay its own.
            stack.enter_context(shape_env.suppress_guards())
            stack.enter_context(shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(mode)
        log = stack.enter_context(_operator_log()())
        observer = _Observer(graph_module, mode, log)
        try:
            observer.run(*observer.fake_inputs(inputs, same_memory_as or inputs), enable_io_processing=False)
        except CannotObserve:
            raise
        except Exception as error:
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CannotObserve(observer.current, first_line) from error
    return Observation(mode, observer.named_values, observer.tensors, observer.effects, log.storages)


class _Observer(torch.fx.Interpreter):
    """Interpret the graph for `observe`. All values stay alive, so that no storage number is given twice."""

    def __init__(self, graph_module: torch.fx.GraphModule, mode: Any, log: Any) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self.extra_traceback = False
        self.mode = mode
        self.log = log
        self.current = "inputs"
        self.chooses_attention = any(operation_of(node) == "_sdpa_kernel" for node in graph_module.graph.nodes)
        self.named_values: dict[str, Any] = {}
        self.tensors: dict[str, tuple[TensorFacts, ...]] = {}
        self.effects: dict[str, Effects] = {}

    def fake_inputs(self, inputs: Sequence[Any], same_memory_as: Sequence[Any]) -> list[Any]:
        """Return one fake tensor per input, laid out as the input is; views of one memory get one storage number."""
        fakes: list[Any] = []
        numbers: dict[int, int] = {}
        for value, real in zip(inputs, same_memory_as, strict=True):
            fakes.append(_fake_like(value, self.mode))
            if isinstance(value, torch.Tensor):
                number = self.log.storage_of(fakes[-1])
                self.log.shared[number] = numbers.setdefault(real.untyped_storage()._cdata, number)
        return fakes

    def run_node(self, n: torch.fx.Node) -> Any:
        self.current = n.name
        if n.op == "output":
            return super().run_node(n)
        effects = self.effects[n.name] = self.log.effects = Effects()
        if n.op == "call_module":
            raise CannotObserve(n.name, "calls of modules are not looked into")
        if n.op == "call_function" and isinstance(n.target, torch_internals.HigherOrderOperator):
            value = self._not_run(n, effects)
        else:
            value = self._run(n, effects)
        on_cpu = any(tensor.device.type == "cpu" for tensor in tensors_in(value))
        if self.chooses_attention and on_cpu and operation_of(n) == "scaled_dot_product_attention":
            effects.opaque = "is attention on the CPU, by a kernel that the graph chooses"
        self.named_values[n.name] = value
        self.tensors[n.name] = tuple(self._facts(tensor) for tensor in tensors_in(value))
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self.mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    def _run(self, n: torch.fx.Node, effects: Effects) -> Any:
        """Return the value of a node; where it depends on data, return what Dynamo noted, with the graph's symbols."""
        try:
            value = super().run_node(n)
        except torch_internals.DataDependentOutputException:
            effects.host_reads.update(self._operand_storages(n))
            return self._noted(n)
        return self._noted(n) if effects.host_reads and "example_value" in n.meta else value

    def _not_run(self, n: torch.fx.Node, effects: Effects) -> Any:
        """Return what Dynamo noted for an operator that runs graphs of its own; it may write to all operands."""
        effects.opaque, effects.awaited = f"{n.target} runs its own graph", True
        effects.writes.update(self._operand_storages(n))
        return self._noted(n)

    def _noted(self, n: torch.fx.Node) -> Any:
        if "example_value" not in n.meta:
            raise CannotObserve(n.name, "nothing is known of its value")
        example = n.meta["example_value"]
        return torch_internals.pytree.tree_map_only(torch.Tensor, lambda one: _fake_like(one, self.mode), example)

    def _operand_storages(self, n: torch.fx.Node) -> list[int]:
        values = [self.env[operand] for operand in n.all_input_nodes]
        return [self.log.storage_of(tensor) for tensor in tensors_in(values)]

    def _facts(self, tensor: torch.Tensor) -> TensorFacts:
        return TensorFacts(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.device,
            self.log.storage_of(tensor),
            tensor.requires_grad,
        )


def _operator_log() -> type:
    """Return the class of the dispatch mode that notes effects; made late because its base is private in PyTorch."""

    class OperatorLog(torch_internals.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.effects = Effects()
            self.storages: dict[int, torch.device] = {}
            self.shared: dict[int, int] = {}
            self._alive: list[torch.Tensor] = []

        def storage_of(self, tensor: torch.Tensor) -> int:
            key = tensor.untyped_storage()._cdata
            if key not in self.storages:
                self.storages[key] = tensor.device
                self._alive.append(tensor)
            return self.shared.get(key, key)

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if func.namespace == "prim":  # reads a tensor's device or layout
                return func(*args, **(kwargs or {}))
            operands = list(tensors_in([args, dict(kwargs or {})]))
            changed = list(tensors_in(list(written(func, args, kwargs or {}))))
            result = func(*args, **(kwargs or {}))
            results = list(tensors_in(result))
            effects = self.effects
            effects.writes.update(self.storage_of(tensor) for tensor in changed)
            if needs_values(func, operands):
                effects.host_reads.update(self.storage_of(t) for t in operands if t.device.type == "cpu")
            if any(tensor.device.type == "cpu" for tensor in (*operands, *results)):
                effects.random_on_cpu |= torch.Tag.nondeterministic_seeded in func.tags
                effects.gpu_obstacle = effects.gpu_obstacle or gpu_obstacle(func, operands, results)
                if func._schema.name in STRIDED:
                    effects.opaque = f"{func} counts places in memory that nothing else here tells of"
                if any(tensor.device.type != "cpu" for tensor in (*operands, *results)):
                    effects.awaited |= awaited_transfer(func, args, kwargs or {})
            if func.namespace not in ("aten", "prims"):
                effects.opaque = f"{func} is a custom operator"
            elif func._schema.name in OTHER_MEMORY:
                effects.opaque = f"{func} gives a tensor other memory"
            for tensor in results:
                self.storage_of(tensor)
            return result

    return OperatorLog


def _is_functorch(target: Any) -> bool:
    module = getattr(target, "__module__", None) or ""
    return module.startswith(("torch._C._functorch", "torch._functorch"))


def _changes_state(target: Any) -> bool:
    """Return whether PyTorch's function `target` sets global state that operations depend on.

    Such are default dtype, inference mode and deterministic algorithms; `ResidentNode.switches` handles gradients and
    autocast.
    """
    if target in (torch_internals.set_grad_enabled, torch_internals.enter_autocast, torch_internals.exit_autocast):
        return False
    is_torchs = (getattr(target, "__module__", None) or "torch").startswith("torch")
    is_function = isinstance(target, (types.BuiltinFunctionType, types.FunctionType))
    return is_torchs and is_function and target.__name__.lstrip("_").startswith(("set_", "enter_", "exit_"))


def operation_of(node: torch.fx.Node) -> str:
    """Return the name of the method or function that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _orders_streams(node: torch.fx.Node) -> bool:
    """Return whether a node waits for the GPU, chooses a stream or records an event.

    The program may then use such nodes to find out that its own asynchronous copies are done.
    """
    if node.op not in ("call_function", "call_method"):
        return False
    name = operation_of(node)
    by_name = name in _STREAM_METHODS if node.op == "call_method" else name.endswith("_synchronize")
    return by_name or str(node.target).startswith("streams.")


def _fake_like(value: Any, mode: Any) -> Any:
    """Return a tensor of `mode` with the layout of `value` and no data; return anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch_internals.FakeTensor):
        raise ValueError(f"a {type(value).__name__} is not looked into")
    if value.layout is not torch.strided or value.is_quantized or is_lazy_view(value):
        raise ValueError("a tensor that is not a plain strided one is not looked into")
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _shape_env(inputs: Sequence[Any]) -> Any:
    """Return the shape environment of the symbols among `inputs`; None where all sizes are numbers."""
    for value in inputs:
        if isinstance(value, torch_internals.FakeTensor) and value.fake_mode.shape_env is not None:
            return value.fake_mode.shape_env
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value.node.shape_env
    return None


@contextlib.contextmanager
def _global_state_kept() -> Iterator[None]:
    """Restore autocast, gradients and the choice of attention kernels, which calls in the graph may switch."""
    devices = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    cache = torch.is_autocast_cache_enabled()
    grad = torch.is_grad_enabled()
    cuda: Any = torch.backends.cuda
    kernels = ("flash", "mem_efficient", "math", "cudnn")
    attention = [(name, getattr(cuda, f"{name}_sdp_enabled")()) for name in kernels]
    try:
        yield
    finally:
        for name, enabled in attention:
            getattr(cuda, f"enable_{name}_sdp")(enabled)
        for device, (enabled, dtype) in zip(devices, autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache)
        torch.set_grad_enabled(grad)
