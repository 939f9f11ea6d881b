"""Analyse the source of a module that Inductor generated: its kernels, and copies in each call.

Note [Counting kernels]. A generated module has one function per partition, which stock PyTorch records into one CUDA
graph each, and `call`, which runs the rest one launch at a time. Every call in these bodies is counted once: a Triton
kernel's `run`, a library call (`extern_kernels.addmm`), an operator that Inductor leaves to PyTorch
(`torch.ops.aten...`), a compiled CPU function. A library call or an operator may launch more than one kernel on the
device, so the numbers are those of the generated program, not of a profile. Code under a CUDA device guard runs on the
GPU, all other code on the CPU; a `copy_` under the guard copies a CPU tensor to the GPU.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from optimizations.in_place.generated import SUMMING_UP

DEVICE_GUARD = "torch.cuda._DeviceGuard"
PARTITION_PREFIX = "partition_"
CALL = "call"

_OPERATOR_ROOTS = ("torch.ops.", "aten.", "inductor_ops.")
_WITHOUT_KERNEL = frozenset({"view", "set_", "resize_storage_bytes_", "_reinterpret_tensor", "alias"})
"""Operators that return views and launch nothing."""


Body = Counter[str]
"""Launches and copies of one function of a generated module in a call, by kind.

`gpu_kernels` are launches on the GPU, library calls and operators included: see Note [Counting kernels]. `cpu_kernels`
are compiled CPU functions and operators on CPU tensors, `host_to_device_copies` copies of CPU tensors to the GPU, and
`blocking_copies` those among them that make the host wait (no `non_blocking`)."""


def read_module(source: str) -> list[Body]:
    """Count the launches and copies of each function of a generated module: partitions in order, and `call` last."""
    tree = ast.parse(source)
    kernels = {name: call.func.attr for name, call in definitions(tree) if isinstance(call.func, ast.Attribute)}
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    numbers = {number: name for name in functions if (number := _partition_number(name)) is not None}
    # All values of a partition are on the GPU; copies in it are between GPU tensors.
    partitions = [
        Body(gpu_kernels=_body(functions[name].body, kernels, on_gpu=True)["gpu_kernels"])
        for _, name in sorted(numbers.items())
    ]
    return [*partitions, _body(functions[CALL].body, kernels, on_gpu=False) if CALL in functions else Body()]


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Yield `name = async_compile.KIND(...)` at module level."""
    for statement in tree.body:
        if (
            isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and isinstance(statement.value, ast.Call)
            and _dotted(statement.value.func).startswith("async_compile.")
        ):
            yield statement.targets[0].id, statement.value


def _partition_number(name: str) -> int | None:
    number = name.removeprefix(PARTITION_PREFIX)
    return int(number) if number != name and number.isdigit() else None


def _body(statements: list[ast.stmt], kernels: dict[str, str], *, on_gpu: bool) -> Body:
    total = Body()
    for statement in statements:
        if isinstance(statement, ast.With):
            guarded = any(_dotted(item.context_expr) == DEVICE_GUARD for item in statement.items)
            total += _body(statement.body, kernels, on_gpu=on_gpu or guarded)
        else:
            for node in ast.walk(statement):
                if isinstance(node, ast.Call):
                    total += _call(node, kernels, on_gpu)
    return total


def _call(node: ast.Call, kernels: dict[str, str], on_gpu: bool) -> Body:
    name, launched = _dotted(node.func), "gpu_kernels" if on_gpu else "cpu_kernels"
    owner, _, member = name.rpartition(".")
    if member == "copy_":
        if not on_gpu:
            return Body()
        waits = not any(isinstance(flag, ast.Constant) and flag.value is True for flag in node.args[1:])
        return Body(["host_to_device_copies", *(["blocking_copies"] if waits else [])])
    if member == "run" and owner in kernels:
        return Body(["gpu_kernels"])
    if name in kernels:
        return Body(["cpu_kernels"])
    # The longer list there is of methods that keep no state: most others launch nothing, and `copy_` is counted above.
    if not name and isinstance(node.func, ast.Attribute) and node.func.attr in SUMMING_UP:
        return Body([launched])
    is_operator = name.startswith(_OPERATOR_ROOTS) and not _WITHOUT_KERNEL.intersection(name.split("."))
    if owner == "extern_kernels" or is_operator:
        return Body([launched])
    return Body()


def _dotted(node: ast.expr) -> str:
    """Return `a.b.c` as text; "" for other expressions, and the name of the callee for a call."""
    if isinstance(node, ast.Call):
        return _dotted(node.func)
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""
