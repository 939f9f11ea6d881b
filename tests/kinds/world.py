"""Provide programs of all kinds with a device, a way to compile, inputs that move, a place for what they found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

Compile = Callable[..., Any]
STEPS = 6
"""Calls of a program: enough for a warm-up, a recording, a second capture, and replays."""


class World:
    """`found` are copies of what the program noted: a later call may overwrite what it got."""

    def __init__(self, device: str, compile_: Compile) -> None:
        self.device = device
        self.compile = compile_
        self.found: list[Any] = []
        self._alive: list[torch.Tensor] = []

    def values(self, seed: int, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
        """Numbers at an address that no earlier call of the program saw."""
        made = torch.randn(*(shape or (3, 4)), generator=torch.Generator().manual_seed(seed), device="cpu")
        return self.moved(made.to(dtype)).requires_grad_(grad)

    def whole(self, seed: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return self.moved(torch.randint(high, shape or (3, 4), generator=generator, device="cpu").to(dtype))

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        self._alive.append(tensor.to(self.device, copy=True))
        return self._alive[-1]

    def module(self, module: Any) -> Any:
        return module.to(self.device)

    def compiled(self, module: Any) -> tuple[Any, Any]:
        """Return a module on the device, and what is compiled of it."""
        module = self.module(module)
        return module, self.compile(module)

    def note(self, *values: Any) -> None:
        for value in values:
            self.found += map(_copied, pytree.tree_leaves(value))

    def note_gradients(self, module: torch.nn.Module) -> None:
        self.note([parameter.grad for parameter in module.parameters() if parameter.grad is not None])
        module.zero_grad()

    def steps(self, count: int = STEPS, *, grad: bool = False) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number of each call and values for it."""
        for step in range(count):
            yield step, self.values(step, grad=grad)

    @torch.no_grad()
    def infer(
        self,
        run: Callable[..., Any],
        steps: int = STEPS,
        *,
        inputs: Callable[[int], Sequence[Any]] | None = None,
        between: Callable[[], Any] = lambda: None,
    ) -> None:
        """Note the results of calls without gradients, with these inputs or values of their own."""
        for step, x in self.steps(steps):
            self.note(run(*(inputs(step) if inputs else [x])))
            between()

    def train(self, result: torch.Tensor, *modules: torch.nn.Module) -> None:
        """Run the backward of a result; note the result and the gradients of modules."""
        result.square().sum().backward()
        self.note(result)
        for module in modules:
            self.note_gradients(module)


def network() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class Kind:
    """One program.

    `on_cpu`, `on_gpu`: where it can be run. `captured`: on the simulated driver something of it becomes a CUDA graph.
    `unlike_eager`: what Dynamo, AOTAutograd or Inductor makes of it differs from eager, or is an error, without
    CUDA graphs as well; the reason. `ends_stock`: under stock's graphs it may end the process.
    """

    run: Callable[[World], None]
    on_cpu: bool
    on_gpu: bool
    captured: bool
    unlike_eager: str | None
    ends_stock: bool


KINDS: dict[str, Kind] = {}


def kind(
    *,
    on_cpu: bool = True,
    on_gpu: bool = True,
    captured: bool = True,
    gradients: bool = True,
    unlike_eager: str | None = None,
    ends_stock: bool = False,
) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    """Register a program. Without `gradients` all of it runs under `torch.no_grad`."""

    def register(run: Callable[[World], None]) -> Callable[[World], None]:
        assert run.__name__ not in KINDS
        run_so = run if gradients else torch.no_grad()(run)
        KINDS[run.__name__] = Kind(run_so, on_cpu, on_gpu, captured, unlike_eager, ends_stock)
        return run

    return register


@dataclass(frozen=True)
class Outcome:
    """Hold what a program noted, and the error that ended it."""

    found: list[Any]
    error: str | None


def outcome(name: str, device: str, compile_: Compile) -> Outcome:
    """Run a seeded program of `KINDS`. An error is its type and the first line without backend or place."""
    torch.manual_seed(0)
    world = World(device, compile_)
    try:
        KINDS[name].run(world)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("backend=")]
        return Outcome(world.found, f"{type(error).__name__}: {lines[0] if lines else ''}")
    assert world.found, "a program that notes nothing shows nothing"
    return Outcome(world.found, None)


def eager(target: Any, **keywords: Any) -> Any:
    return target


def differences(one: Outcome, other: Outcome, rtol: float = 1e-4, atol: float = 1e-5) -> list[str]:
    """Return where an outcome differs from the other."""
    if one.error != other.error:
        return [f"{one.error or 'no error'}, not {other.error or 'no error'}"]
    if len(one.found) != len(other.found):
        return [f"{len(one.found)} values, not {len(other.found)}"]
    return _unlike(one.found, other.found, rtol, atol)


def _unlike(found: list[Any], expected: list[Any], rtol: float, atol: float) -> list[str]:
    lines = []
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        try:
            if isinstance(other, torch.Tensor):
                assert type(one) is type(other), f"a {type(one).__name__}, not a {type(other).__name__}"
                torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)
            else:
                assert type(one) is type(other) and one == other, f"{one!r}, not {other!r}"
        except AssertionError as error:
            lines.append(f"value {number}: {error}")
    return lines
