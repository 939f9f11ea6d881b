"""Read from the source of a generated function how it uses its inputs.

Generated code is straight-line: it names its inputs, launches Triton kernels with `kernel.run(...)`, calls libraries
and operators by name, and returns. From that follows, without running anything,

* whether one more capture can be noticed by the program: it can if the function calls something that is not known to
  be free of state, such as an operator of the program's own;
* which inputs are used by Triton kernels only, and how often. A Triton kernel can reach an input through its
  parameters only. So if a captured graph holds exactly that many pointers to the input, all of them in Triton kernels,
  no other use can be hidden from it.

Note [Doubt about the source]. Whatever is not understood counts against: an unknown call makes the function opaque, a
use that is not the plain argument of a Triton kernel makes the input's uses unknown.

Note [Seeds of attention]. Two operators read their random state where the run needs it. Outside a capture they read it
on the host, inside a capture they pass its address on the GPU to a kernel. Their forwards return it accordingly. A
forward that replays a graph therefore leaves seeds on the GPU that a backward without a graph cannot read: the process
ends. The numbers are the same on both sides, because a captured backward adds nothing to the stored offset. Other
attention operators (flash, cuDNN) have an argument of the same name and keep it on the GPU in every case.

Note [Writes through views]. Inductor records a write under the name of the buffer that is written. Where it leaves a
view to an operator (views of complex tensors, `torch._inductor.config.fallback_by_default`) the view is a buffer of
its own, and a write to it is not taken for one to the input: `x[1].mul_(2)` of a complex `x`. CUDA graphs that
believe this write a placeholder, and the caller's tensor stays as it was. So the views that operators make are
followed here, by their schemas.

Note [Memory that is taken over]. `buf1 = arg0_1` gives the memory of a dead input to a result. What is written there
is not the input any more.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.graph.plan import is_collective_kernel, is_collective_operator
from optimizations.selection import UNKNOWN_OPERATOR_KERNELS
from optimizations.torch_internals.left_out import uncapturable

READERS = ("_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward")
"""The operators (of `aten`) that read seeds on the host outside a capture."""

SEEDS = ("philox_seed", "philox_offset")
"""Their arguments that hold random state."""


def names_a_reader(source: str) -> bool:
    """Return whether generated source may call one of `READERS`."""
    return any(name in source for name in READERS)


def find_seeds(calls: Iterable[tuple[str, ast.Call]], inputs: Mapping[str, int]) -> tuple[int, ...]:
    """Return the positions of inputs that are passed to `READERS` as seeds.

    Args:
        calls: the calls of a generated function, each with its dotted name.
        inputs: positions of inputs by name.
    """
    found: set[int] = set()
    for name, call in calls:
        parts = name.split(".")
        reader = next((one for one in READERS if one in parts), None)
        if reader is None:
            continue
        given = dict(enumerate(call.args))
        named = {one.arg: one.value for one in call.keywords}
        for position, seed in _positions(reader):
            value = given.get(position, named.get(seed))
            if isinstance(value, ast.Call) and value.args:  # reinterpret_tensor(philox_seed, ...)
                value = value.args[0]
            if isinstance(value, ast.Name) and value.id in inputs:
                found.add(inputs[value.id])
    return tuple(sorted(found))


@functools.cache
def _positions(reader: str) -> tuple[tuple[int, str], ...]:
    """Return position and name of the seeds among an operator's arguments, from its schema."""
    arguments = getattr(torch.ops.aten, reader).default._schema.arguments
    return tuple((position, one.name) for position, one in enumerate(arguments) if one.name in SEEDS)


Memory = frozenset[int]
"""Positions of the inputs whose memory something lies in."""

_NONE: Memory = frozenset()

_VIEWS = frozenset(("view", "to"))
"""Methods of tensors in generated code whose results may lie in the tensor's memory."""


def written_through_views(definition: ast.FunctionDef, inputs: Mapping[str, int]) -> Memory:
    """Return the positions of inputs that operators write, in a function's syntax tree.

    `inputs` are the positions by name.
    """
    writes = _Writes(inputs)
    writes.visit(definition)
    return frozenset(writes.written)


class _Writes(ast.NodeVisitor):
    """Follow the memory of inputs through straight-line code. `written`: the inputs that are written so far."""

    def __init__(self, inputs: Mapping[str, int]) -> None:
        self.written: set[int] = set()
        self._inputs = inputs
        self._memory: dict[str, Memory] = {name: frozenset((position,)) for name, position in inputs.items()}

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        value = node.value
        if isinstance(value, ast.Name) and value.id == "args":
            return
        # Note [Memory that is taken over]
        taken_over = isinstance(value, ast.Name) and value.id in self._inputs
        memory = _NONE if taken_over or _is_other_memory(value) else self._memory_of(value)
        for target in node.targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    self._memory[name.id] = memory

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        for parameter, value in _given(node):
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                self.written |= self._memory_of(value)

    def _memory_of(self, value: ast.expr) -> Memory:
        if isinstance(value, ast.Name):
            return self._memory.get(value.id, _NONE)
        if isinstance(value, ast.Subscript):
            return self._memory_of(value.value)
        if isinstance(value, (ast.List, ast.Tuple)):
            return _NONE.union(*map(self._memory_of, value.elts))
        if isinstance(value, ast.Call):
            if dotted(value.func) == "reinterpret_tensor" and value.args:
                return self._memory_of(value.args[0])
            if isinstance(value.func, ast.Attribute) and value.func.attr in _VIEWS:
                return self._memory_of(value.func.value)
            shared = [one for parameter, one in _given(value) if parameter.alias_info is not None]
            return _NONE.union(*map(self._memory_of, shared))
        return _NONE


def _is_other_memory(value: ast.expr) -> bool:
    """Return whether it is a dead buffer in another shape, as a result gets it."""
    return isinstance(value, ast.Call) and dotted(value.func) == "reinterpret_tensor"


def _given(call: ast.Call) -> Iterator[tuple[Any, ast.expr]]:
    """Yield the parameters of an operator's schema with what a call passes; nothing where no operator is called."""
    operator = _operator(dotted(call.func))
    if operator is None:
        return
    parameters = operator._schema.arguments
    by_name = {parameter.name: parameter for parameter in parameters}
    positional = [parameter for parameter in parameters if not parameter.kwarg_only]
    yield from zip(positional, call.args, strict=False)
    yield from ((by_name[one.arg], one.value) for one in call.keywords if one.arg in by_name)


def _operator(name: str) -> Any:
    """Return the operator of a name, `torch.ops.aten.slice.Tensor` or in short `aten.slice.Tensor`; None for others."""
    parts = name.removeprefix("torch.ops.").split(".")
    if not name.startswith(("torch.ops.", "aten.")) or len(parts) != 3:
        return None
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None)
    return found if isinstance(found, torch_internals.OpOverload) else None


_PURE_OF_LIBRARIES: Mapping[str, frozenset[str]] = {
    "torchvision": frozenset(
        f"{prefix}{name}{suffix}"
        for name in ("roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d")
        for prefix, suffix in (("", ""), ("_", "_backward"))
    )
}
"""Operators of other libraries whose sources have been read (torchvision's `csrc/ops/cuda`): each reads its inputs,
writes new tensors, and keeps no state."""

COLLECTIVE_OPERATORS = (
    "_c10d_functional",
    "_c10d_functional_autograd",
    "c10d",
    "c10d_functional",
    "symm_mem",
    "_dtensor",
)
"""Namespaces of PyTorch whose operators involve other processes."""

COLLECTIVE_CALLS = frozenset(("empty_strided_p2p",))
"""Functions that Inductor calls for them as well: memory that other processes reach."""

_PURE_CALLS = frozenset(
    (
        "args.clear",
        "reinterpret_tensor",
        "alloc_from_pool",
        "empty_strided_cuda",
        "empty_strided_cpu",
        "empty_strided_cpu_pinned",
        "get_raw_stream",
        "torch.cuda._DeviceGuard",
        "torch.cuda.set_device",
        "assert_size_stride",
        "assert_alignment",
        "torch.empty_strided",
        # tensor maps that the host makes for a Triton kernel of the program
        "triton.tools.tensor_descriptor.TensorDescriptor.from_tensor",
        "triton.tools.experimental_descriptor.create_1d_tma_descriptor",
        "triton.tools.experimental_descriptor.create_2d_tma_descriptor",
        "device",
        "torch.device",
        # of sizes that differ from call to call
        "max",
        "min",
        "abs",
        "int",
        "float",
        "bool",
        "len",
        "math.ceil",
        "math.floor",
        "math.sqrt",
        "math.trunc",
    )
)
_RANDOM = re.compile(
    r"rand|seed|bernoulli|dropout|multinomial|normal|uniform|exponential|geometric|poisson|philox|rng|attention"
)
"""In the names of operators that draw random numbers, and of attention, which may."""

SUMMING_UP = frozenset(("sum", "prod", "amin", "amax", "to"))
"""Methods of tensors by which generated code adds up what a kernel left that reduces along rows and columns at once, as
that of a layer norm does backward: `workspace_0[0 : 4].view(2, 2).sum(dim=0)`. Each computes, in a kernel of its own,
and keeps no state."""

_METHODS = SUMMING_UP | {"copy_", "zero_", "fill_", "data_ptr", "size", "stride", "view"}
"""Methods of tensors that generated code calls."""

_METHODS_WITHOUT_KERNELS = frozenset(("data_ptr", "size", "stride", "view"))

_CHECKS = frozenset(("assert_size_stride", "assert_alignment"))

_PRODUCTS = frozenset(
    f"{owner}.{name}"
    for owner in ("extern_kernels", "aten", "torch.ops.aten")
    for operator in ("mm", "addmm", "bmm", "baddbmm", "bias_addmm", "_scaled_mm", "convolution", "cudnn_convolution")
    for name in (operator, f"{operator}.default", f"{operator}.out")
)
"""Operators whose libraries are given addresses as parameters of kernels, or in tensor maps among these, and keep none
in the GPU's memory."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Describe a launch of a Triton kernel.

    `kernel` is the driver's name of it, `inputs` the positions of inputs among its arguments, each as often as it is
    passed.
    """

    kernel: str
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GeneratedCode:
    """Hold the facts that are known about a generated function.

    Attributes:
        opaque: what it calls that could notice one more capture; None where nothing does.
        random: whether it draws random numbers.
        collective: whether it involves other processes.
        triton_uses: by position among the inputs, how often Triton kernels are given it, for inputs that nothing else
            uses. An input that is not here has uses that are unknown.
        products: positions of inputs that nothing but Triton kernels and products (`mm`, `convolution`, ...) uses.
            Their addresses are among the parameters of kernels, and nowhere else on the GPU.
        launches: the launches of Triton kernels, in the order of the source.
        reused: positions of inputs whose memory the function takes for something else once they are dead; None where
            that is not known.
        written: positions of inputs that operators are seen to write, whatever Inductor says of them.
        seeds: positions of inputs that are random state of memory-efficient attention. Note [Seeds of attention].
        kernels: how many kernels it launches at least: Triton kernels and library calls are one each, an operator is
            `UNKNOWN_OPERATOR_KERNELS`. None where the source cannot be read.
        uncapturable: an operator that it calls and that cannot be captured; None where there is none.
    """

    opaque: str | None
    random: bool = False
    collective: bool = False
    triton_uses: Mapping[int, int] = field(default_factory=dict)
    reused: frozenset[int] | None = frozenset()
    launches: tuple[Launch, ...] = ()
    written: frozenset[int] = frozenset()
    products: frozenset[int] = frozenset()
    seeds: tuple[int, ...] = ()
    kernels: int | None = None
    uncapturable: str | None = None

    @property
    def triton_kernels(self) -> frozenset[str]:
        """Return the names of the Triton kernels that it launches, as the driver gives them."""
        return frozenset(launch.kernel for launch in self.launches)

    def returns(self, index: int) -> bool:
        """Return whether an output in the memory of an input is that input, and not a result that was put there."""
        return self.reused is not None and index not in self.reused


def read_generated(function: Callable[..., Any]) -> GeneratedCode:
    """Return what is known of a function that Inductor generated. Note [Doubt about the source]."""
    plain = getattr(function, "__func__", function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        return GeneratedCode(f"its source cannot be read ({type(error).__name__})", reused=None)
    kernels = {
        name: str(getattr(getattr(value, "fn", None), "__name__", name))
        for name, value in getattr(plain, "__globals__", {}).items()
        if isinstance(value, torch_internals.CachingAutotuner)
    }
    definition = tree.body[0] if tree.body else None
    if not isinstance(definition, ast.FunctionDef):
        return GeneratedCode("its source is not a function", reused=None)
    return read_function(definition, kernels)


def read_function(definition: ast.FunctionDef, kernels: Mapping[str, str]) -> GeneratedCode:
    """Return what is known of a function's syntax tree; `kernels` maps its names of Triton kernels to the driver's."""
    definition = _WithoutAlignment().visit(definition)
    inputs = input_names(definition)
    if inputs is None:
        return GeneratedCode("its source does not begin by naming its inputs", reused=None)
    calls = _call_nodes(definition)
    names = dict.fromkeys(dotted(call.func) for call in calls)
    opaque = next(filter(None, (_objection(call.func, kernels) for call in calls)), None)
    uses = _Uses(kernels, inputs)
    uses.visit(definition)
    reused = frozenset(inputs[name] for name in uses.reused if name in inputs)
    random = any(_RANDOM.search(name) for name in names)
    launches = tuple(
        Launch(
            kernels[dotted(call.func).rpartition(".")[0]],
            tuple(inputs[one.id] for one in call.args if isinstance(one, ast.Name) and one.id in inputs),
        )
        for call in calls
        if _is_launch(dotted(call.func), kernels)
    )
    known = {
        position: sum(launch.inputs.count(position) for launch in launches)
        for name, position in inputs.items()
        if name not in uses.unknown
    }
    written = written_through_views(definition, inputs)
    products = frozenset(position for name, position in inputs.items() if name not in uses.elsewhere)
    return GeneratedCode(
        opaque,
        random,
        any(_is_collective(name, kernels) for name in names),
        known,
        reused,
        launches,
        written,
        products,
        find_seeds(called_by(definition), inputs),
        sum(_kernels(call.func, kernels) for call in calls),
        next(filter(None, map(uncapturable, names)), None),
    )


class _WithoutAlignment(ast.NodeTransformer):
    """Leave out `arg0_1 = copy_if_misaligned(arg0_1)`, which PyTorch 2.14 and later generate.

    Inputs of a graph are aligned: placeholders are, and what is read in place has the alignment of the recording.
    """

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | None:
        called = node.value
        if not isinstance(called, ast.Call) or dotted(called.func) != "copy_if_misaligned":
            return node
        same = [ast.unparse(one) for one in node.targets] == [ast.unparse(one) for one in called.args]
        return None if same else node


def called_by(definition: ast.FunctionDef) -> list[tuple[str, ast.Call]]:
    """Return the calls of a function in the order of the source, each with its dotted name."""
    return [(dotted(call.func), call) for call in _call_nodes(definition)]


def _kernels(called: ast.expr, kernels: Collection[str]) -> int:
    """Return how many kernels a call launches."""
    name = dotted(called)
    if name in _PURE_CALLS:
        return 0
    if isinstance(called, ast.Attribute) and called.attr in _METHODS and _is_tensor(called.value):
        return 0 if called.attr in _METHODS_WITHOUT_KERNELS else 1
    known = _is_launch(name, kernels) or name.startswith("extern_kernels.") or name in _PRODUCTS
    return 1 if known else UNKNOWN_OPERATOR_KERNELS


def _is_launch(name: str, kernels: Collection[str]) -> bool:
    owner, _, member = name.rpartition(".")
    return member == "run" and owner in kernels


def input_names(definition: ast.FunctionDef) -> dict[str, int] | None:
    """Return positions by name from the line `arg0_1, arg1_1 = args`; None where there is no such line."""
    for statement in definition.body:
        if (
            isinstance(statement, ast.Assign)
            and isinstance(statement.value, ast.Name)
            and statement.value.id == "args"
            and isinstance(statement.targets[0], (ast.Tuple, ast.List))
            and all(isinstance(name, ast.Name) for name in statement.targets[0].elts)
        ):
            names = [name.id for name in statement.targets[0].elts if isinstance(name, ast.Name)]
            return {name: position for position, name in enumerate(names)} if len(set(names)) == len(names) else None
    return None


def _call_nodes(definition: ast.FunctionDef) -> list[ast.Call]:
    """Return everything that is called, in the order of the source."""
    calls = [node for node in ast.walk(definition) if isinstance(node, ast.Call)]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def _is_collective(name: str, kernels: Collection[str]) -> bool:
    """Return whether a call of this function involves other processes."""
    parts = name.split(".")
    if parts[:2] == ["torch", "ops"] and len(parts) > 3:
        pure = parts[2] in torch_internals.PURE_OPERATORS
        return parts[2] in COLLECTIVE_OPERATORS or (not pure and is_collective_operator(parts[3]))
    if parts[-1] == "run" and parts[0] in kernels:
        return is_collective_kernel(parts[0])
    return name in COLLECTIVE_CALLS


def _objection(called: ast.expr, kernels: Collection[str]) -> str | None:
    """Return why a call of this makes the function opaque; None where it does not."""
    name = dotted(called)
    if name in COLLECTIVE_CALLS:
        return f"it takes part in a collective, {name}"
    if name in _PURE_CALLS or name.startswith("extern_kernels.") or name.startswith("aten."):
        return None
    owner, _, member = name.rpartition(".")
    if member == "run" and owner in kernels:
        return f"it takes part in a collective, {owner}" if is_collective_kernel(owner) else None
    if isinstance(called, ast.Attribute) and called.attr in _METHODS and _is_tensor(called.value):
        return None
    parts = name.split(".")
    if parts[:2] == ["torch", "ops"] and len(parts) > 3:
        if parts[2] in torch_internals.PURE_OPERATORS or parts[3] in _PURE_OF_LIBRARIES.get(parts[2], ()):
            return None
        collective = parts[2] in COLLECTIVE_OPERATORS or is_collective_operator(parts[3])
        kind = "takes part in a collective" if collective else "calls a custom operator"
        return f"it {kind}, {parts[2]}::{parts[3]}"
    return f"it calls {name or ast.unparse(called)}, whose effects are not known"


def _is_tensor(node: ast.expr) -> bool:
    """Return whether it is a buffer, a part of one, or the result of a call, which is judged by itself."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return isinstance(node, (ast.Name, ast.Call))


class _Uses(ast.NodeVisitor):
    """Collect the inputs with uses that are not arguments of Triton kernels.

    `unknown`: names with any such use; `elsewhere`: those that are used by more than products, too. `reused`: names
    whose memory another name was given to, in another shape or the same.
    """

    def __init__(self, kernels: Collection[str], inputs: Mapping[str, int]) -> None:
        self._kernels = kernels
        self._inputs = inputs
        self.unknown: set[str] = set()
        self.elsewhere: set[str] = set()
        self.reused: set[str] = set()
        self._in_product = False

    def visit_Call(self, node: ast.Call) -> None:
        name = dotted(node.func)
        if _is_launch(name, self._kernels) and not is_collective_kernel(name.rpartition(".")[0]):
            for argument in node.args:
                if not isinstance(argument, ast.Name):
                    self.visit(argument)
            for keyword in node.keywords:
                self.visit(keyword.value)
        elif name in _CHECKS:
            for argument in node.args[1:]:
                self.visit(argument)
        else:
            outer = self._in_product
            self._in_product = name in _PRODUCTS or (outer and name == "reinterpret_tensor")
            self.generic_visit(node)
            self._in_product = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        renamed = node.value
        if isinstance(renamed, ast.Call) and dotted(renamed.func) == "reinterpret_tensor" and renamed.args:
            renamed = renamed.args[0]
        if isinstance(renamed, ast.Name) and renamed.id in self._inputs:
            self.reused.add(renamed.id)
        for target in node.targets:
            # A second binding of an input's name would make later uses those of another value.
            named = [target] if isinstance(target, ast.Name) else getattr(target, "elts", [])
            defines = isinstance(node.value, ast.Name) and node.value.id == "args"
            bound = [one.id for one in named if isinstance(one, ast.Name) and not defines]
            self.unknown.update(bound)
            self.elsewhere.update(bound)
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        pass

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self._inputs:
            self.unknown.add(node.id)
            if not self._in_product:
                self.elsewhere.add(node.id)


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` as text; "" for other expressions."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""
