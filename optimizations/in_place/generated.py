"""Parse the source of a generated function to find how it uses its inputs.

Generated code is straight-line: it names its inputs, launches Triton kernels with `kernel.run(...)`, calls libraries
and operators by name, and returns. The source therefore shows, without running anything,

* whether one more capture could have side effects: it could if the function calls something that may keep state, such
  as a custom operator of the program;
* which inputs only Triton kernels use, and how often. A Triton kernel can reach an input through its parameters only.
  So if a captured graph holds exactly that many pointers to the input, all in Triton kernels, it has no other uses.

Note [Doubt about the source]. Whatever is not recognized is treated as unsafe: an unknown call makes the function
opaque, and a use other than a plain argument of a Triton kernel makes the input's uses unknown.

Note [Seeds of attention]. Two operators read their random state in host memory outside a capture, and pass its address
on the GPU to a kernel inside a capture. Their forwards return it in the same place. So a forward that replays a graph
leaves seeds on the GPU, and a backward without a graph that reads them on the host crashes the process. The values are
the same in both places, because a captured backward adds nothing to the stored offset. Other attention operators
(flash, cuDNN) have an argument of the same name and always keep it on the GPU.

Note [Writes through views]. Inductor records a write under the name of the buffer that is written. If it calls an
operator for a view (complex tensors, `torch._inductor.config.fallback_by_default`), the view is a buffer of its own,
and a write to it does not count as a write to the input: `x[1].mul_(2)` of a complex `x`. A graph captured on that
record writes its placeholder and never the caller's tensor. So this module tracks views that operators make, by their
schemas.

Note [Memory that is taken over]. `buf1 = arg0_1` gives the memory of a dead input to a result. Later writes to that
memory do not write the input.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.graph.plan import is_collective_kernel, is_collective_operator
from optimizations.selection import UNKNOWN_OPERATOR_KERNELS
from optimizations.torch_internals.left_out import uncapturable

READERS = ("_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward")
"""The operators (of `aten`) that read seeds in host memory outside a capture."""

SEEDS = ("philox_seed", "philox_offset")
"""The arguments of `READERS` that hold random state."""


def names_a_reader(source: str) -> bool:
    """Return whether generated source may call one of `READERS`."""
    return any(name in source for name in READERS)


def _find_seeds(calls: Iterable[tuple[str, ast.Call]], inputs: Mapping[str, int]) -> tuple[int, ...]:
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
"""Positions of the inputs whose memory a value may share."""

_NONE: Memory = frozenset()

_VIEWS = frozenset(("view", "to"))
"""Methods of tensors in generated code whose results may share the tensor's memory."""


class _Writes(ast.NodeVisitor):
    """Track which values share memory with inputs. `written` holds the inputs that operators have written so far.

    Note [Writes through views].
    """

    def __init__(self, inputs: Mapping[str, int]) -> None:
        self.written: set[int] = set()
        self._inputs = inputs
        self._memory: dict[str, Memory] = {name: frozenset((position,)) for name, position in inputs.items()}

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        value = node.value
        if isinstance(value, ast.Name) and value.id == "args":
            return
        # Note [Memory that is taken over], also in another shape
        taken_over = isinstance(value, ast.Name) and value.id in self._inputs
        taken_over = taken_over or (isinstance(value, ast.Call) and dotted(value.func) == "reinterpret_tensor")
        memory = _NONE if taken_over else self._memory_of(value)
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


def _given(call: ast.Call) -> Iterator[tuple[Any, ast.expr]]:
    """Yield the parameters of an operator's schema with the call's arguments; nothing if no operator is called."""
    operator = _operator(dotted(call.func))
    if operator is None:
        return
    parameters = operator._schema.arguments
    by_name = {parameter.name: parameter for parameter in parameters}
    positional = [parameter for parameter in parameters if not parameter.kwarg_only]
    yield from zip(positional, call.args, strict=False)
    yield from ((by_name[one.arg], one.value) for one in call.keywords if one.arg in by_name)


def _operator(name: str) -> Any:
    """Return the operator named `torch.ops.aten.slice.Tensor` or `aten.slice.Tensor`; None for other names."""
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
"""Operators of other libraries that only read inputs and write new tensors, by their source (torchvision's
`csrc/ops/cuda`)."""

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
"""Functions that Inductor calls for collectives: they allocate memory that other processes access."""

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
"""Matches names of operators that draw random numbers, and of attention operators, which may do so."""

SUMMING_UP = frozenset(("sum", "prod", "amin", "amax", "to"))
"""Methods of tensors with which generated code completes a split reduction, such as that of a layer norm's backward:
`workspace_0[0 : 4].view(2, 2).sum(dim=0)`. Each launches one kernel and keeps no state."""

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
"""Operators whose libraries pass addresses as kernel parameters or in tensor maps among these, and store none in GPU
memory."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Describe a launch of a Triton kernel.

    `kernel` is its name in the driver; `inputs` are the positions of inputs among its arguments, repeated if passed
    repeatedly.
    """

    kernel: str
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GeneratedCode:
    """Hold what the source of a generated function shows.

    Attributes:
        opaque: the call that could have side effects in one more capture; None if there is none.
        random: whether it draws random numbers.
        collective: whether it involves other processes.
        triton_uses: by position, how often an input is passed to Triton kernels, for inputs with no other uses. The
            uses of all other inputs are unknown.
        products: positions of inputs that only Triton kernels and products (`mm`, `convolution`, ...) use. Their
            addresses are among the parameters of kernels, and nowhere else on the GPU.
        launches: the launches of Triton kernels, in the order of the source.
        reused: positions of inputs whose memory the function reuses once they are dead; None if unknown.
        written: positions of inputs that operators write by their schemas, whether or not Inductor records it.
        seeds: positions of inputs that are random state of memory-efficient attention. Note [Seeds of attention].
        kernels: lower bound of the kernels that it launches: one for each Triton kernel and library call, and
            `UNKNOWN_OPERATOR_KERNELS` for an operator. None if the source cannot be read.
        uncapturable: an operator that it calls and that cannot be captured; None if there is none.
        is_partition: whether it is one of several partitions of a program.
        hands_results_on: whether a later partition of the same program may read its results.
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
    is_partition: bool = False
    hands_results_on: bool = False

    @property
    def triton_kernels(self) -> frozenset[str]:
        """Return the driver's names of the Triton kernels that it launches."""
        return frozenset(launch.kernel for launch in self.launches)

    def returns(self, index: int) -> bool:
        """Return whether a partition returns this input to a later one, and not a result that reuses its memory."""
        return self.is_partition and self.reused is not None and index not in self.reused


def read_generated(function: Callable[..., Any]) -> GeneratedCode:
    """Parse a function that Inductor generated. Note [Doubt about the source]."""
    plain = getattr(function, "__func__", function)
    names, number = getattr(plain, "__globals__", {}), re.fullmatch(r"partition_(\d+)", getattr(plain, "__name__", ""))
    several = "partition_1" in names
    later = several and (number is None or f"partition_{int(number[1]) + 1}" in names)
    return replace(_read_source(plain), is_partition=several, hands_results_on=later)


def _read_source(plain: Any) -> GeneratedCode:
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
    """Examine a function's syntax tree; `kernels` maps its names of Triton kernels to the driver's names."""
    definition = _WithoutAlignment().visit(definition)
    inputs = _input_names(definition)
    if inputs is None:
        return GeneratedCode("its source does not begin by naming its inputs", reused=None)
    calls = _called_by(definition)
    names = dict(calls)
    opaque = next(filter(None, (_objection(name, call.func, kernels) for name, call in calls)), None)
    uses, writes = _Uses(kernels, inputs), _Writes(inputs)
    uses.visit(definition)
    writes.visit(definition)
    reused = frozenset(inputs[name] for name in uses.reused if name in inputs)
    random = any(_RANDOM.search(name) for name in names)
    launches = tuple(
        Launch(
            kernels[name.rpartition(".")[0]],
            tuple(inputs[one.id] for one in call.args if isinstance(one, ast.Name) and one.id in inputs),
        )
        for name, call in calls
        if _is_launch(name, kernels)
    )
    known = {
        position: sum(launch.inputs.count(position) for launch in launches)
        for name, position in inputs.items()
        if name not in uses.unknown
    }
    products = frozenset(position for name, position in inputs.items() if name not in uses.elsewhere)
    return GeneratedCode(
        opaque,
        random,
        any(_is_collective(name, kernels) for name in names),
        known,
        reused,
        launches,
        frozenset(writes.written),
        products,
        _find_seeds(calls, inputs),
        sum(_kernels(name, call.func, kernels) for name, call in calls),
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


def _called_by(definition: ast.FunctionDef) -> list[tuple[str, ast.Call]]:
    """Return the calls of a function in the order of the source, each with its dotted name."""
    calls = [node for node in ast.walk(definition) if isinstance(node, ast.Call)]
    return [(dotted(call.func), call) for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset))]


def _kernels(name: str, called: ast.expr, kernels: Collection[str]) -> int:
    """Return how many kernels a call launches."""
    if name in _PURE_CALLS:
        return 0
    if isinstance(called, ast.Attribute) and called.attr in _METHODS and _is_tensor(called.value):
        return 0 if called.attr in _METHODS_WITHOUT_KERNELS else 1
    known = _is_launch(name, kernels) or name.startswith("extern_kernels.") or name in _PRODUCTS
    return 1 if known else UNKNOWN_OPERATOR_KERNELS


def _is_launch(name: str, kernels: Collection[str]) -> bool:
    owner, _, member = name.rpartition(".")
    return member == "run" and owner in kernels


def _input_names(definition: ast.FunctionDef) -> dict[str, int] | None:
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


def _is_collective(name: str, kernels: Collection[str]) -> bool:
    """Return whether a call of this function involves other processes."""
    parts = name.split(".")
    if parts[:2] == ["torch", "ops"] and len(parts) > 3:
        pure = parts[2] in torch_internals.PURE_OPERATORS
        return parts[2] in COLLECTIVE_OPERATORS or (not pure and is_collective_operator(parts[3]))
    if parts[-1] == "run" and parts[0] in kernels:
        return is_collective_kernel(parts[0])
    return name in COLLECTIVE_CALLS


def _objection(name: str, called: ast.expr, kernels: Collection[str]) -> str | None:
    """Return why calling `called`, of this dotted name, makes the function opaque; None if it does not."""
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
    """Return whether it is a buffer, a part of one, or the result of a call, which is examined separately."""
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
            # After a second binding of an input's name, later uses are uses of another value.
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
