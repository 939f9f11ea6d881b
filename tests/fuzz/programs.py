"""Draw random programs from a seed as data, build them as FX graphs like Dynamo's, and print them as programs.

A step is an operation and its operands; a step that fake tensors call illegal on their devices is left out. So every
program is one that PyTorch would run, and any of its steps may be taken away.
"""

from __future__ import annotations

import logging
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.fx

from optimizations import torch_internals

from .sources import INPUTS, WRITES, Input

GPU = torch.device("cuda:0")
STEPS = 9
CALLS = 4
# PyTorch logs every operation that turns out to be illegal; here that is part of the game.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

Step = tuple[int, tuple[int, int, int]]


@dataclass(frozen=True)
class Program:
    """A program as data.

    `steps` are operations (by number) with operands (by number, the inputs come first). `outputs` are values, counted
    from the last, and what is done with them before they are returned. `writes` are, for the time before each call but
    the first, the way an attribute is written from outside, by attribute. `scribbles`: in which calls the caller
    overwrites its first result. `limits`: options of the backend.
    """

    steps: tuple[Step, ...]
    outputs: tuple[tuple[int, int], ...]
    writes: tuple[dict[str, str], ...]
    scribbles: tuple[bool, ...]
    options: dict[str, Any]


def draw(seed: int, number: int) -> Program:
    """Program `number` of `seed`; the same in every process."""
    choose = random.Random(f"{seed} {number}")
    # Recent values are likelier operands, so that programs are chains and not heaps.
    steps = tuple(
        (choose.randrange(10**6), tuple(choose.randrange(10**6) for _ in range(3)))  # type: ignore[misc]
        for _ in range(choose.randint(4, STEPS))
    )
    outputs = tuple((choose.randrange(8), choose.randrange(4)) for _ in range(choose.randint(1, 3)))
    ways = [*WRITES, "replaced"]
    attributes = [entry.name for entry in INPUTS if entry.kind == "attribute" and not entry.landing]
    writes = tuple(
        {name: choose.choice(ways) for name in attributes if choose.random() < 0.4} for _ in range(CALLS - 1)
    )
    options: dict[str, Any] = choose.choice(
        (
            *({}, {}, {}, {"hoist_limit_bytes": 0}, {"hoist_limit_bytes": 60}, {"process_limit_bytes": 100}),
            *({"hoist_limit_bytes": 20, "stage_limit_bytes": 60}, {"stage_limit_bytes": 30}),
        )
    )
    return Program(steps, outputs, writes, tuple(choose.random() < 0.3 for _ in range(CALLS)), options)


OPERATIONS: tuple[tuple[str, Any, int, tuple[Any, ...], dict[str, Any]], ...] = (
    # (kind, target, operands, further arguments, keyword arguments)
    *(("call_method", "to", 1, (GPU,), {}),) * 6,
    *(("land", "to", 1, (GPU,), {}),) * 2,
    ("land", "to", 1, (GPU,), {"non_blocking": True}),
    ("time", "mul_", 1, (3,), {}),
    *(("again", "to", 1, (GPU,), {}),) * 2,
    *(("wild", operator.getitem, 2, (), {}),) * 2,
    ("call_method", "to", 1, (GPU, torch.float32), {}),
    ("call_method", "to", 1, (GPU,), {"non_blocking": True}),
    ("call_method", "cuda", 1, (), {}),
    *(("gpu", "cpu", 1, (), {}),) * 4,
    *(("last", "to", 1, (GPU,), {}),) * 6,
    ("call_method", "to", 2, (), {}),
    ("call_function", torch.tensor, 0, (0.1,), {}),
    ("call_function", torch.tensor, 0, ([1.0, 2.5, -3.0],), {}),
    ("call_function", torch.arange, 0, (3,), {}),
    ("call_function", torch.zeros, 0, (4, 3), {}),
    ("call_function", torch.full, 0, ((3,), float("-inf")), {}),
    ("call_function", torch.full, 0, ((4, 3), 0.1), {"dtype": torch.bfloat16}),
    ("call_function", torch.linspace, 0, (0.0, 1.0, 3), {}),
    ("call_function", torch.rand, 0, (3,), {}),
    ("call_method", "float", 1, (), {}),
    ("call_method", "double", 1, (), {}),
    ("call_method", "long", 1, (), {}),
    ("call_method", "clone", 1, (), {}),
    ("call_method", "clone", 1, (), {"memory_format": torch.contiguous_format}),
    ("call_method", "detach", 1, (), {}),
    *(("call_method", "contiguous", 1, (), {}),) * 3,
    ("call_method", "flatten", 1, (), {}),
    ("call_method", "t", 1, (), {}),
    ("call_method", "reshape", 1, (-1,), {}),
    ("call_method", "expand", 1, (4, 3), {}),
    ("call_method", "as_strided", 1, ((2, 2), (2, 1)), {}),
    ("window", "as_strided", 1, ((3,), (1,), 6), {}),
    ("window", "as_strided", 1, ((2, 2), (1, 2), 0), {}),
    ("call_method", "unsqueeze", 1, (0,), {}),
    ("call_method", "triu", 1, (1,), {}),
    ("call_method", "floor", 1, (), {}),
    ("call_method", "sum", 1, (), {}),
    ("call_method", "cumsum", 1, (0,), {}),
    ("call_method", "argmax", 1, (), {}),
    ("call_method", "masked_fill", 2, (float("-inf"),), {}),
    ("call_method", "fill_", 1, (2,), {}),
    *(("call_method", "add_", 2, (), {}),) * 2,
    ("call_method", "copy_", 2, (), {}),
    *(("call_method", "mul_", 1, (3,), {}),) * 2,
    ("call_function", operator.neg, 1, (), {}),
    *(("call_function", operator.add, 2, (), {}),) * 2,
    ("call_function", operator.sub, 2, (), {}),
    *(("call_function", operator.mul, 2, (), {}),) * 3,
    *(("call_function", operator.truediv, 2, (), {}),) * 3,
    ("call_function", operator.truediv, 1, (3,), {}),
    ("call_function", operator.lt, 2, (), {}),
    ("call_function", operator.iadd, 2, (), {}),
    ("matmul", operator.matmul, 2, (), {}),
    ("products", operator.matmul, 2, (), {}),
    ("call_function", torch.sin, 1, (), {}),
    ("call_function", torch.where, 3, (), {}),
    ("call_function", torch.full_like, 1, (0.5,), {}),
    ("call_function", operator.getitem, 2, (), {}),
    ("slice", operator.getitem, 1, (), {}),
    ("setitem", operator.setitem, 2, (), {}),
    ("pair", torch.cat, 2, (), {}),
    ("pair", torch.stack, 2, (), {}),
)


@dataclass(frozen=True)
class AttributeSource:
    """Stands for Dynamo's source of a tensor that a module holds."""

    name: str
    guard_source: Any = field(
        default_factory=lambda: SimpleNamespace(is_unspecialized_nn_module=lambda: True), hash=False, compare=False
    )


@dataclass
class Built:
    """The graph of a program, fake inputs as Dynamo would give them, and the inputs that it reads."""

    graph_module: torch.fx.GraphModule
    inputs: list[Any]
    used: tuple[Input, ...]


def build(program: Program) -> Built:
    builder = _Builder()
    for choice, operands in program.steps:
        builder.step(choice, operands)
    return builder.finish(program.outputs)


class _Builder:
    def __init__(self) -> None:
        self.mode = torch_internals.FakeTensorMode()
        self.graph = torch.fx.Graph()
        self.values: list[tuple[torch.fx.Node, Any]] = []
        self.landing: list[tuple[torch.fx.Node, Any]] = []
        self.wild: list[tuple[torch.fx.Node, Any]] = []
        self.inputs: dict[str, Any] = {}
        for entry in INPUTS:
            node = self.graph.placeholder(entry.name)
            tried = self._fake(entry)
            if entry.kind != "argument":
                torch_internals.describe_input(node, AttributeSource(entry.name), static=False)
            if entry.kind == "numpy":
                del node.meta["tensor_dict"]
            pool = self.landing if entry.landing else self.wild if entry.wild else self.values
            pool.append((node, tried))

    def _fake(self, entry: Input) -> Any:
        strides = {"gapped": (6, 2), "expanded": (0, 1), "transposed": (1, 4)}.get(entry.layout)
        device = GPU if entry.on_gpu else "cpu"
        with self.mode:
            if strides is None:
                return torch.empty(entry.shape, dtype=entry.dtype, device=device)
            return torch.empty_strided(entry.shape, strides, dtype=entry.dtype, device=device)

    def _pick(self, number: int) -> tuple[torch.fx.Node, Any]:
        """A value; two times out of three one of the last four."""
        pool = self.values[-4:] if number % 3 else self.values
        return pool[number // 3 % len(pool)]

    def step(self, choice: int, operands: Sequence[int]) -> None:
        kind, target, count, further, keywords = OPERATIONS[choice % len(OPERATIONS)]
        chosen = [self._pick(number) for number in operands[:count]]
        if kind in ("time", "again", "window"):
            chosen = [next(value for value in self.values if value[0].name == kind)]
        if kind == "last":
            chosen = [self.values[-1]]
        if kind == "gpu":
            on_gpu = [value for value in self.values if value[1].device == GPU]
            chosen = [on_gpu[operands[0] % len(on_gpu)]]
        if kind == "products":
            whole = [value for value in self.values if value[1].device.type == "cpu" and value[1].dtype is torch.int64]
            matrices = [value for value in whole if value[1].dim() == 2]
            chosen = [matrices[number % len(matrices)] for number in operands[:count]]
        if kind == "land":
            chosen = [self.landing[operands[0] % len(self.landing)]]
        if kind == "wild":
            chosen[1] = self.wild[0]
            if chosen[0][1].device.type != "cpu":
                return
        if kind == "matmul" and any(value.device == GPU and not value.is_floating_point() for _, value in chosen):
            return
        if target == "long" and chosen[0][1].device == GPU and chosen[0][1].is_floating_point():
            return  # out of range, devices differ
        methods = ("land", "last", "gpu", "time", "again", "window")
        op = kind if kind.startswith("call_") else "call_method" if kind in methods else "call_function"
        arguments = _arguments(kind, [node for node, _ in chosen]) + further
        fakes = _arguments(kind, [fake for _, fake in chosen]) + further
        try:
            with self.mode:
                method = op == "call_method"
                value = getattr(fakes[0], target)(*fakes[1:], **keywords) if method else target(*fakes, **keywords)
        except Exception:
            return
        node = self.graph.create_node(op, target, arguments, keywords)
        if isinstance(value, torch.Tensor):
            self.values.append((node, value))

    def finish(self, outputs: Sequence[tuple[int, int]]) -> Built:
        """Returns values, the latest first; most CPU values go to the GPU before, and some GPU values to the CPU."""
        nodes = []
        for index, use in outputs:
            node, value = self.values[-1 - index % len(self.values)]
            if value.device.type == "cpu" and use:
                node = self.graph.call_method("to", (node, GPU))
                node = node if use == 1 else self.graph.call_function(operator.mul, (node, 2))
            elif value.device == GPU and use == 1:
                node = self.graph.call_function(operator.mul, (self.graph.call_method("cpu", (node,)), 2))
            nodes.append(node)
        self.graph.output(tuple(nodes))
        for node in [node for node in self.graph.nodes if node.op == "placeholder" and not node.users]:
            self.graph.erase_node(node)
        names = [node.name for node in self.graph.nodes if node.op == "placeholder"]
        used = tuple(entry for entry in INPUTS if entry.name in names)
        for node, entry in zip((node for node in self.graph.nodes if node.op == "placeholder"), used, strict=True):
            # Not the ones that operations were tried on, which may have changed.
            node.meta["example_value"] = self.inputs[entry.name] = self._fake(entry)
        graph_module = torch.fx.GraphModule(torch.nn.Module(), self.graph)
        return Built(graph_module, [self.inputs[entry.name] for entry in used], used)


def _arguments(kind: str, operands: list[Any]) -> tuple[Any, ...]:
    shapes: dict[str, Callable[[], tuple[Any, ...]]] = {
        "slice": lambda: (operands[0], slice(0, 2)),
        "setitem": lambda: (operands[0], slice(0, 1), operands[1]),
        "pair": lambda: (list(operands),),
    }
    return shapes.get(kind, lambda: tuple(operands))()


def text(program: Program, *, repeat: str) -> str:
    """Return what a reader needs of a program; `repeat` is the command that found it."""
    lines = [
        f"# {repeat}; before later calls attributes are written: {list(program.writes)}",
        f"# the caller overwrites its first result in calls {[i for i, yes in enumerate(program.scribbles) if yes]}",
        f"# options: {program.options!r}",
    ]
    return "\n".join([*lines, build(program).graph_module.code.strip()])
