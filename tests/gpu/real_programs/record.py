"""Programs are registered by a decorator on the function that builds them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

FAMILIES = ("generation", "weights", "shapes", "kept", "training", "vision", "serving")
"""Modules of this package that register programs."""

COMPILE: Mapping[str, Mapping[str, str] | None] = {
    "eager": None,
    "compile": {},
    "stock": {"mode": "reduce-overhead"},
    "encore": {"backend": "encore"},
    "aot_eager": {"backend": "aot_eager"},
}
"""Keywords of `torch.compile` in each mode; None: the program is not compiled. aot_eager needs no GPU."""

T = TypeVar("T")
Target = TypeVar("Target", bound=Callable[..., Any])


class Skipped(Exception):
    """This program cannot run here; the message says why."""


@dataclass(frozen=True)
class Setting:
    """Device, mode and size of a program. `tiny`: the smallest size, to test the script itself."""

    mode: str
    device_name: str
    tiny: bool

    @cached_property
    def device(self) -> torch.device:
        import torch

        return torch.device(self.device_name)

    @property
    def compiles(self) -> bool:
        return COMPILE[self.mode] is not None

    def compile(self, target: Target, **keywords: Any) -> Target:
        """`torch.compile` in this mode; eager gives `target` back."""
        import torch

        return torch.compile(target, **self.keywords(), **keywords) if self.compiles else target

    def keywords(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile`, for libraries that call it and for `torch.nn.Module.compile`."""
        return dict(COMPILE[self.mode] or {})

    def compile_in_place(self, module: torch.nn.Module) -> None:
        """`module.compile(...)`: its class, and what others hold of it, stay the same."""
        if self.compiles:
            module.compile(**self.keywords())

    def pick(self, full: T, tiny: T) -> T:
        return tiny if self.tiny else full


@dataclass(frozen=True)
class Body:
    """A built program.

    Attributes:
        step: the program's call number i, from 0 on; what it does depends on i and on earlier calls only. It returns a
            nest (lists, tuples, dicts) of tensors and numbers.
        final: what is left at the end of all calls, such as weights.
    """

    step: Callable[[int], Any]
    final: Callable[[], Any] = tuple


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        calls: calls that are compared with eager's, and in one timed round.
        trains: its results depend on how many calls there were before; else call i gives the same at any time.
        keeps: the caller keeps the results of all calls of a round as they are, and reads them at its end.
            Otherwise each result is read before the next call.
        needs: modules that must be installed.
        tolerance: relative L2 error that a result may have against eager's.
    """

    name: str
    family: str
    summary: str
    build: Callable[[Setting], Body]
    calls: int
    trains: bool
    keeps: bool
    needs: tuple[str, ...]
    tolerance: float

    def missing(self) -> tuple[str, ...]:
        return tuple(module for module in self.needs if importlib.util.find_spec(module) is None)


_REGISTRY: dict[str, Program] = {}


def program(
    *,
    calls: int = 12,
    trains: bool = False,
    keeps: bool = False,
    needs: tuple[str, ...] = (),
    tolerance: float = 1e-3,
) -> Callable[[Callable[[Setting], Body]], Callable[[Setting], Body]]:
    """Registers a builder under its function's name; the first line of its docstring is the summary."""

    def add(build: Callable[[Setting], Body]) -> Callable[[Setting], Body]:
        name = build.__name__
        if name in _REGISTRY:
            raise ValueError(f"two programs are called {name}")
        summary = (build.__doc__ or "").strip().splitlines()[0]
        family = build.__module__.rpartition(".")[2]
        _REGISTRY[name] = Program(name, family, summary, build, calls, trains, keeps, needs, tolerance)
        return build

    return add


def programs() -> Mapping[str, Program]:
    """All programs by name, family by family."""
    for family in FAMILIES:
        importlib.import_module(f"{__package__}.{family}")
    return dict(_REGISTRY)
