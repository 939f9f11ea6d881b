"""Random FX graphs that mix CPU and GPU values, for differential tests of placement.

A program is drawn as a list of small integers; each step tries one operation on earlier values, and is kept if fake
tensors say that it is legal on their devices. So every program drawn is one that PyTorch would run.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.fx
from hypothesis import strategies as st

from optimizations import torch_internals

GPU = torch.device("cuda:0")
STEPS = 14
# PyTorch logs every operation that turns out to be illegal; here that is part of the game.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class AttributeSource:
    """Stands for Dynamo's source of a tensor that a module holds."""

    name: str
    guard_source: Any = field(
        default_factory=lambda: SimpleNamespace(is_unspecialized_nn_module=lambda: True), hash=False, compare=False
    )


@dataclass(frozen=True)
class Input:
    """One placeholder: on which device, whether a module holds it, and whether it is made anew per call (NumPy)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_gpu: bool = False
    attribute: bool = False
    made_per_call: bool = False
    view_of: int | None = None


INPUTS = (
    Input("x", (4, 3), torch.float32, on_gpu=True),
    Input("h", (3,), torch.bfloat16, on_gpu=True),
    Input("k", (4,), torch.int64, on_gpu=True),
    Input("step", (), torch.int64),
    Input("time", (1,), torch.float32),
    Input("index", (2,), torch.int64),
    Input("offsets", (3,), torch.float64),
    Input("index_view", (1,), torch.int64, view_of=5),
    Input("scale", (), torch.float64, attribute=True, made_per_call=True),
    Input("table", (3,), torch.float64, attribute=True, made_per_call=True),
    Input("mask", (4, 3), torch.float32, attribute=True),
    Input("weights", (3,), torch.bfloat16, attribute=True),
    Input("gate", (), torch.float32, attribute=True),
    Input("flags", (4,), torch.bool, attribute=True),
)


def fresh_arguments(seed: int) -> list[torch.Tensor]:
    """Real CPU tensors for all `INPUTS`; different seeds give different values."""
    generator = torch.Generator().manual_seed(seed)
    values: list[torch.Tensor] = []
    for entry in INPUTS:
        if entry.view_of is not None:
            values.append(values[entry.view_of][: entry.shape[0]])
        elif entry.dtype is torch.bool:
            values.append(torch.rand(entry.shape, generator=generator) < 0.5)
        elif entry.dtype is torch.int64:
            values.append(torch.randint(0, 3, entry.shape, generator=generator))
        else:
            values.append(torch.randn(entry.shape, generator=generator).to(entry.dtype))
    return values


def _random(like: torch.Tensor) -> torch.Tensor:
    return torch.rand(like.shape)


OPERATIONS: tuple[tuple[str, Any, int, tuple[Any, ...], dict[str, Any]], ...] = (
    # (kind, target, operands, further arguments, keyword arguments)
    ("call_function", torch.tensor, 0, (0.1,), {}),
    ("call_function", torch.tensor, 0, ([1.0, 2.5, -3.0],), {}),
    ("call_function", torch.tensor, 0, ([0, 2],), {}),
    ("call_function", torch.arange, 0, (3,), {}),
    ("call_function", torch.arange, 0, (4, 0, -1.0), {}),
    ("call_function", torch.zeros, 0, (4, 3), {}),
    ("call_function", torch.full, 0, ((3,), float("-inf")), {}),
    ("call_function", torch.ones, 0, (3,), {"dtype": torch.float64}),
    ("call_function", torch.linspace, 0, (0.0, 1.0, 3), {"device": GPU}),
    ("call_function", torch.rand, 0, (3,), {}),
    ("call_method", "to", 1, (GPU,), {}),
    ("call_method", "to", 1, (GPU, torch.float32), {}),
    ("call_method", "to", 1, (GPU,), {"non_blocking": True}),
    ("call_method", "cuda", 1, (), {}),
    ("call_method", "cpu", 1, (), {}),
    ("call_method", "to", 1, ("cpu",), {}),
    ("call_method", "to", 2, (), {}),
    ("call_method", "float", 1, (), {}),
    ("call_method", "long", 1, (), {}),
    ("call_method", "clone", 1, (), {}),
    ("call_method", "detach", 1, (), {}),
    ("call_method", "contiguous", 1, (), {}),
    ("call_method", "t", 1, (), {}),
    ("call_method", "reshape", 1, (-1,), {}),
    ("call_method", "view", 1, (3, -1), {}),
    ("call_method", "expand", 1, (4, 3), {}),
    ("call_method", "unsqueeze", 1, (0,), {}),
    ("call_method", "squeeze", 1, (), {}),
    ("call_method", "triu", 1, (1,), {}),
    ("call_method", "sum", 1, (), {}),
    ("call_method", "cumsum", 1, (0,), {}),
    ("call_method", "argmax", 1, (), {}),
    ("call_method", "new_zeros", 1, (3,), {}),
    ("call_method", "masked_fill", 2, (float("-inf"),), {}),
    ("call_method", "pow", 1, (2,), {}),
    ("call_method", "fill_", 1, (2,), {}),
    ("call_method", "add_", 2, (), {}),
    ("call_method", "copy_", 2, (), {}),
    ("call_method", "mul_", 1, (3,), {}),
    ("call_method", "triu_", 1, (), {}),
    ("call_method", "unsqueeze_", 1, (0,), {}),
    ("call_method", "type_as", 2, (), {}),
    ("call_method", "new_tensor", 1, ([1.0, 2.0, 3.0],), {}),
    ("call_function", operator.neg, 1, (), {}),
    ("call_function", operator.add, 2, (), {}),
    ("call_function", operator.sub, 2, (), {}),
    ("call_function", operator.mul, 2, (), {}),
    ("call_function", operator.truediv, 2, (), {}),
    ("call_function", operator.pow, 1, (2,), {}),
    ("call_function", operator.lt, 2, (), {}),
    ("call_function", operator.iadd, 2, (), {}),
    ("call_function", torch.sin, 1, (), {}),
    ("call_function", torch.exp, 1, (), {}),
    ("call_function", torch.where, 3, (), {}),
    ("call_function", torch.maximum, 2, (), {}),
    ("call_function", torch.full_like, 1, (0.5,), {}),
    ("call_function", torch.rand_like, 1, (), {}),
    ("call_function", torch.as_tensor, 1, (), {"device": GPU}),
    ("getitem", operator.getitem, 2, (), {}),
    ("getitem_column", operator.getitem, 2, (), {}),
    ("slice", operator.getitem, 1, (), {}),
    ("setitem", operator.setitem, 2, (), {}),
    ("setitem_at", operator.setitem, 3, (), {}),
    ("pair", torch.cat, 2, (), {}),
    ("pair", torch.stack, 2, (), {}),
    ("unbind", torch.unbind, 1, (), {}),
)


@dataclass
class Program:
    """A graph, fake inputs as Dynamo would give them, and which of `INPUTS` these are: those the graph reads."""

    graph_module: torch.fx.GraphModule
    inputs: list[Any]
    used: tuple[int, ...]


class _Builder:
    def __init__(self) -> None:
        self.mode = torch_internals.FakeTensorMode()
        self.graph = torch.fx.Graph()
        self.values: list[tuple[torch.fx.Node, Any]] = []
        self.inputs: list[Any] = []
        for entry in INPUTS:
            self._input(entry)

    def _input(self, entry: Input) -> None:
        node = self.graph.placeholder(entry.name)
        # One to try operations on, and one that no operation changes.
        tried, noted = self._fake(entry, [value for _, value in self.values]), self._fake(entry, self.inputs)
        node.meta["example_value"] = noted
        if entry.attribute:
            torch_internals.describe_input(node, AttributeSource(entry.name), static=False)
        if entry.made_per_call:
            del node.meta["tensor_dict"]
        self.inputs.append(noted)
        self.values.append((node, tried))

    def _fake(self, entry: Input, earlier: Sequence[Any]) -> Any:
        with self.mode:
            if entry.view_of is not None:
                return earlier[entry.view_of][: entry.shape[0]]
            return torch.empty(entry.shape, dtype=entry.dtype, device=GPU if entry.on_gpu else "cpu")

    def step(self, choice: int, operands: Sequence[int]) -> None:
        kind, target, count, further, keywords = OPERATIONS[choice % len(OPERATIONS)]
        chosen = [self.values[index % len(self.values)] for index in operands[:count]]
        op = kind if kind.startswith("call_") else "call_function"
        arguments = _arguments(kind, [node for node, _ in chosen]) + further
        fakes = _arguments(kind, [fake for _, fake in chosen]) + further
        versions = [fake._version for _, fake in self.values if isinstance(fake, torch.Tensor)]
        try:
            with self.mode:
                value = (
                    getattr(fakes[0], target)(*fakes[1:], **keywords)
                    if op == "call_method"
                    else target(*fakes, **keywords)
                )
        except Exception:
            # Illegal on these devices, shapes or dtypes: not a program. A failed write must not have happened.
            assert versions == [fake._version for _, fake in self.values if isinstance(fake, torch.Tensor)]
            return
        node = self.graph.create_node(op, target, arguments, keywords)
        if kind == "unbind":
            for position, item in enumerate(value[:2]):
                self.values.append((self.graph.call_function(operator.getitem, (node, position)), item))
        elif isinstance(value, torch.Tensor):
            self.values.append((node, value))

    def finish(self, outputs: Sequence[tuple[int, int]]) -> Program:
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
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        used = tuple(position for position, node in enumerate(placeholders) if node.users)
        for node in placeholders:
            if not node.users:
                self.graph.erase_node(node)
        return Program(
            torch.fx.GraphModule(torch.nn.Module(), self.graph), [self.inputs[position] for position in used], used
        )


def _arguments(kind: str, operands: list[Any]) -> tuple[Any, ...]:
    shapes: dict[str, Callable[[], tuple[Any, ...]]] = {
        "getitem_column": lambda: (operands[0], (slice(None), operands[1])),
        "slice": lambda: (operands[0], slice(0, 2)),
        "setitem": lambda: (operands[0], slice(0, 1), operands[1]),
        "setitem_at": lambda: (operands[0], operands[1], operands[2]),
        "pair": lambda: (list(operands),),
    }
    return shapes.get(kind, lambda: tuple(operands))()


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A program of at most `STEPS` operations that returns up to four of its values."""
    small = st.integers(0, 250)
    drawn = draw(st.lists(st.tuples(small, small, small, small), min_size=6, max_size=STEPS))
    outputs = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=4))
    builder = _Builder()
    for choice, *operands in drawn:
        builder.step(choice, operands)
    return builder.finish(outputs)
