"""Random programs over graphed callables: blocks of all kinds in random orders, and what users do around them.

A program is drawn from a seed, and runs with its blocks as they are or graphed. What it computes, and leaves, is the
same in both: losses, results that are kept, gradients wherever they go, weights and buffers.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

ROWS, WIDTH = 4, 3
ITERATIONS = 5
TRAITS = (
    *("norm", "dropout", "relu", "sigmoid", "counts", "loose", "tied", "embeds", "sums", "pair"),
    *("dict", "views", "constant"),
)
AROUND_A_CALL = (*[""] * 5, "write", "write a view", "keep", "small", "hook", "ask", "validate", "write a weight")
BETWEEN_STEPS = (
    *("forget", "zero", "keep gradients", "train", "train", "exchange", "load", "freeze", "mode", "drop", "scale"),
    *("copy", "hook", "nothing"),
)


class Block(nn.Module):
    """A layer with some of the `TRAITS`."""

    def __init__(self, traits: tuple[str, ...], seed: int, shared: nn.Parameter) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.traits, self.scale = traits, 1.0
        self.linear, self.norm, self.table = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Embedding(4, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        if "tied" in traits:
            self.linear.weight = shared
        self.loose = [shared] if "loose" in traits else []

    def forward(self, x: torch.Tensor, cache: torch.Tensor | None = None) -> Any:
        has = self.traits.__contains__
        y = self.linear(x) * self.scale
        y = self.norm(y) if has("norm") else y
        y = functional.dropout(y, 0.3, self.training) if has("dropout") else y
        y = torch.relu_(y) if has("relu") else y
        y = y.sigmoid() if has("sigmoid") else y
        if has("counts"):
            with torch.no_grad():
                self.count.add_(x.detach().sum())
            y = y + self.count.clone() * 0.01
        y = y @ self.loose[0] if has("loose") else y
        y = y + self.table(x.detach().argmax(-1)) if has("embeds") else y
        y = y.detach() if has("constant") else y
        y = y + self.linear.bias.sum() if has("sums") else y
        if has("pair"):
            return y, (y * 2).detach(), x.detach()
        if has("dict"):
            return {"y": y, "z": y + 1, "number": 3, "cache": cache}
        return (y, y.view(-1), None) if has("views") else y


@dataclass(frozen=True, slots=True)
class Program:
    """Hold what happens around each event of the order, and after each iteration."""

    traits: list[tuple[str, ...]]
    order: list[int]
    given: bool
    requires_grad: list[bool]
    outputs: str
    steps: list[tuple[list[str], str]]


def drawn(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    count = rng.randint(1, 3)
    order = [*range(1, count + 1), *range(-count, 0)]
    if given := rng.random() < 0.7:
        order = _order(rng, count)
    return Program(
        traits=[tuple(rng.sample(TRAITS, rng.randint(0, 5))) for _ in range(count)],
        order=order,
        given=given,
        requires_grad=[rng.random() < 0.6 for _ in range(count)],
        outputs=rng.choice(["static", "copied"]),
        steps=[([rng.choice(AROUND_A_CALL) for _ in order], rng.choice(BETWEEN_STEPS)) for _ in range(ITERATIONS)],
    )


def _order(rng: random.Random, count: int) -> list[int]:
    waiting = [number for number in range(1, count + 1) for _ in range(rng.randint(1, 3))]
    rng.shuffle(waiting)
    running: list[int] = []
    found = []
    while waiting or running:
        if waiting and (not running or rng.random() < 0.5):
            running.append(waiting.pop())
            found.append(running[-1])
        else:
            running.remove(number := rng.choice(running))
            found.append(-number)
    return found


Make = Callable[..., Any]


def outcome(seed: int, device: str, graphed: Make | None) -> tuple[list[Any], Any]:
    """Return what the program computed and left, and what `graphed(blocks, samples, **options)` made, if given."""
    return _Running(seed, device, graphed).outcome()


class _Running:
    def __init__(self, seed: int, device: str, graphed: Make | None) -> None:
        self.program, self.device = drawn(seed), device
        torch.manual_seed(100 + seed)
        shared = nn.Parameter(torch.randn(WIDTH, WIDTH).to(device))
        self.blocks = [
            Block(traits, 10 * seed + index, shared).to(device) for index, traits in enumerate(self.program.traits)
        ]
        self.caches = [torch.zeros(WIDTH, device=device) for _ in self.blocks]
        self.group: Any = None
        if graphed is not None:
            samples = [self._arguments(index, self._input(index)) for index in range(len(self.blocks))]
            order = self.program.order if self.program.given else None
            self.group = graphed(self.blocks, samples, order=order, outputs=self.program.outputs)
        torch.manual_seed(7)
        self.log: list[Any] = []
        self.kept: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []

    def _input(self, index: int, rows: int = ROWS) -> torch.Tensor:
        x = torch.randn(rows, WIDTH).to(self.device)
        return x.requires_grad_(self.program.requires_grad[index])

    def _arguments(self, index: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        takes_cache = "dict" in self.program.traits[index]
        return (x, self.caches[index]) if takes_cache else (x,)

    def _parameters(self) -> list[torch.Tensor]:
        return list({id(one): one for block in self.blocks for one in block.parameters()}.values())

    def outcome(self) -> tuple[list[Any], Any]:
        for actions, end in self.program.steps:
            self._iteration(actions)
            self._between(end)
        self.gradients.sort(key=lambda one: (tuple(one.shape), float(one.sum())))  # hooks have no order
        state = [one for block in self.blocks for one in [*block.parameters(), *block.buffers()]]
        left = [*state, *(one.grad for one in self._parameters()), *self.caches]
        return [*self.log, *self.kept, *self.gradients, *left], self.group

    def _iteration(self, actions: list[str]) -> None:
        running: dict[int, list[Any]] = {number: [] for number in range(1, len(self.blocks) + 1)}
        for entry, action in zip(self.program.order, actions, strict=True):
            if entry > 0:
                running[entry].append(self._forward(entry - 1, action))
            elif not self._backward(-entry - 1, action, *running[-entry].pop(0)):
                return

    def _forward(self, index: int, action: str) -> Any:
        block, traits = self.blocks[index], self.program.traits[index]
        if action == "validate":
            with torch.no_grad():
                self.log.append(first(block(*self._arguments(index, self._input(index).detach()))).clone())
        x = self._input(index, 2 if action == "small" else ROWS)
        returned = block(*self._arguments(index, x))
        y = first(returned)
        writable = self.program.outputs == "static" and "views" not in traits  # a copy may be written as one likes
        if writable and action == "write" and not (y.is_leaf and y.requires_grad):
            y += 1
        if writable and action == "write a view" and y.requires_grad:
            y[0] *= 2
        if action == "keep":
            self.kept += [y, *others(returned)]
        if action == "write a weight":
            with torch.no_grad():
                block.linear.weight.mul_(1.0)
        self.log += [one.detach().clone() for one in (y, *others(returned))]
        return x, returned

    def _backward(self, index: int, action: str, x: torch.Tensor, returned: Any) -> bool:
        """Return whether it went well."""
        if not first(returned).requires_grad:
            return True
        loss = first(returned).square().sum() + sum(one.sum() for one in others(returned) if one.requires_grad)
        del returned
        if action == "hook" and x.requires_grad:
            x.register_hook(self.gradients.append)
        try:
            if action == "ask":
                wanted = [one for one in self.blocks[index].parameters() if one.requires_grad]
                found = torch.autograd.grad(loss, wanted, allow_unused=True)
                self.gradients += [gradient for gradient in found if gradient is not None]
            else:
                loss.backward()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            self.log.append("written before the backward")
            for parameter in self._parameters():  # eager had begun
                parameter.grad = None
            self.gradients.clear()
            return False
        self.log += [x.grad.clone()] if x.grad is not None else []
        return True

    def _between(self, end: str) -> None:
        chosen, parameters = self.blocks[0], self._parameters()
        there = [one for one in parameters if one.grad is not None]
        if end in ("forget", "keep gradients"):
            self.gradients += [one.grad for one in there if one.grad is not None] if end == "keep gradients" else []
            for one in there:
                one.grad = None
        elif end == "zero":
            for one in there:
                one.grad.zero_()  # type: ignore[union-attr]
        elif end == "train":
            with torch.no_grad():
                for one in there:
                    one.sub_(0.01 * one.grad)  # type: ignore[operator]
        elif end == "exchange":
            chosen.linear.bias.data = chosen.linear.bias.data.clone() + 1
        elif end == "load":
            halved = {name: one * 0.5 if one.is_floating_point() else one for name, one in chosen.state_dict().items()}
            chosen.load_state_dict(halved)
        elif end == "freeze":
            weight = self.blocks[-1].linear.weight
            weight.requires_grad_(not weight.requires_grad)
        elif end == "mode":
            chosen.train(not chosen.training)
        elif end == "drop":
            self.kept.clear()
        elif end == "scale":
            chosen.scale += 0.5
        elif end == "hook":
            chosen.linear.bias.register_hook(self.gradients.append)
        elif end == "copy":
            with torch.no_grad():
                self.log.append(first(copy.deepcopy(chosen)(*self._arguments(0, self._input(0).detach()))).clone())


def first(returned: Any) -> torch.Tensor:
    """The result that a block computes."""
    found: torch.Tensor = returned["y"] if isinstance(returned, dict) else returned
    return found[0] if isinstance(found, tuple) else found


def others(returned: Any) -> list[torch.Tensor]:
    """Results next to it."""
    if isinstance(returned, dict):
        return [returned["z"]]
    return [one for one in returned[1:] if one is not None] if isinstance(returned, tuple) else []


def differences(some: list[Any], others: list[Any], *, tolerance: float = 0.0) -> Iterator[str]:
    """Return where two outcomes differ."""
    if len(some) != len(others):
        yield f"{len(some)} values and {len(others)}"
    for index, (one, other) in enumerate(zip(some, others, strict=False)):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            if not torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True):
                yield f"value {index} of {len(some)}"
        elif isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor) or one != other:
            yield f"value {index}: {one} and {other}"
