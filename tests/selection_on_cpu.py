"""Selection in the calls of a program: stock's CUDAGraph Trees on host memory, times simulated from what really ran.

Note [Simulated times]. A timer here looks at what the harness counted between its beginning and its end: runs of the
plain function, launches of graphs, bytes copied into placeholders. Each has a price. So a candidate has the time of the
one that the test means only if calls were really served by it.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_on_cpu import CudaOnCpu
from torch.testing._internal.distributed.fake_pg import FakeStore
from trees_on_cpu import Compiled, Model, nodes, values

from optimizations.selection import identity, member, timing, way
from optimizations.selection.decide import Rules
from optimizations.selection.settings import Settings
from optimizations.selection.store import VerdictStore

W = values(7)
RULES = Rules(most_calls=600)


class Prices:
    """Seconds for what was counted, and the timers that ask for them. Note [Simulated times]."""

    def __init__(self, cuda: CudaOnCpu) -> None:
        self.cuda = cuda
        self.plain, self.launch, self.copied_byte = 10e-6, 10e-6, 0.0
        self.models: list[Model] = []
        self.late = 0
        self.timed = 0
        self.may = True
        self.noise = random.Random(3)

    def counted(self) -> tuple[int, int, int]:
        runs = sum(model.runs.count("plain") for model in self.models)
        return runs, self.cuda.replays, sum(node.copied_bytes for node in nodes())

    def timer_for(self, objective: str, device_index: int) -> Any:
        return SimulatedTimer(self)


class SimulatedTimer:
    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.before = prices.counted()

    def begin(self) -> None:
        assert self.prices.may, "nothing is timed in a capture of the user's"
        self.prices.timed += 1
        self.before = self.prices.counted()

    def end(self) -> Any:
        runs, launches, copied = (
            after - before for before, after in zip(self.before, self.prices.counted(), strict=True)
        )
        prices = self.prices
        seconds = 5e-6 + runs * prices.plain + launches * prices.launch + copied * prices.copied_byte
        return Measured(seconds * prices.noise.gauss(1, 0.003), prices.timed + prices.late, prices)


class Measured:
    """Is known once `Prices.late` more calls were timed."""

    def __init__(self, seconds: float, known_at: int, prices: Prices) -> None:
        self._seconds, self._known_at, self._prices = seconds, known_at, prices

    def seconds(self) -> float | None:
        return self._seconds if self._prices.timed >= self._known_at else None


@pytest.fixture
def make(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """See `maker`."""
    return maker(cuda_on_cpu, monkeypatch, tmp_path)


def maker(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[..., Any]:
    """Makes prices and a function with selection: `make(plain=..., ...)`, the rest for `Compiled`."""
    monkeypatch.setattr(identity, "_gpu", lambda index: "a GPU that the host plays")

    # The harness has no generated code: functions are told apart by what the test calls them.
    def digest_of(generated: Any, integers: Any, extra: Any, read: Any = str) -> str | None:
        found: str | None = getattr(generated, "digest", None)
        return hashlib.sha256(f"{found}{integers}".encode()).hexdigest() if found and integers else found

    monkeypatch.setattr(member, "graph_digest", digest_of)
    monkeypatch.setattr(way.WAY, "_holder", None)
    prices: list[Prices] = []

    def made(
        *, mode: str = "measure", model: Model | None = None, digest: str | None = "a" * 64, **keywords: Any
    ) -> tuple[Prices, Compiled]:
        money = {name: keywords.pop(name) for name in ("plain", "launch", "copied_byte", "late") if name in keywords}
        if not prices:
            prices.append(Prices(cuda_on_cpu))
            monkeypatch.setattr(timing, "timer_for", prices[0].timer_for)
            monkeypatch.setattr(timing, "may_time", lambda: prices[0].may)
        for name, price in money.items():
            setattr(prices[0], name, price)
        chosen = model or Model(cuda_on_cpu)
        chosen.digest = digest  # type: ignore[attr-defined]
        prices[0].models.append(chosen)
        settings = Settings(mode, rules=RULES, store=VerdictStore(folder / "verdicts"))  # type: ignore[arg-type]
        return prices[0], Compiled(chosen, selection=settings, **keywords)

    return made


def run(compiled: Compiled, calls: int, *, moving: bool = True, w: torch.Tensor = W) -> None:
    """Calls with right results, at ever new addresses or always the same."""
    kept = [(values(1), values(2))]
    for step in range(calls):
        x, y = kept[-1]
        if moving:
            x, y = values(step), values(-3 * step)
            kept.append((x, y))
            del kept[:-4]
        else:
            x.fill_(step)
        assert torch.equal(compiled(x, y, w)[0], 2 * x + y * w), step


def run_and_hold(compiled: Compiled, calls: int) -> None:
    """Calls in steps of their own whose last three results are held, and stay right."""
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(calls):
        x, y = values(step), values(2 * step)
        torch.compiler.cudagraph_mark_step_begin()
        (result,) = compiled.function([x, y, W])
        held.append((result, 2 * x + y * W))
        del held[:-3]
        assert all(torch.equal(one, expected) for one, expected in held), step


def selection(compiled: Compiled) -> Any:
    return compiled.functions[-1].selection()


@contextlib.contextmanager
def ranks(count: int) -> Iterator[None]:
    """A process group of this many, of which the others are never there."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def pair(make: Any, cuda: CudaOnCpu, **keywords: Any) -> tuple[Prices, Compiled, Compiled]:
    """Two functions, and the second reads what the first returns."""
    prices, first = make(model=Model(cuda), digest="d" * 64, **keywords)
    _, second = make(model=Model(cuda), digest="e" * 64, **keywords)
    return prices, first, second


def run_pair(first: Compiled, second: Compiled, calls: int) -> None:
    kept = []
    for step in range(calls):
        x, y = values(step), values(step + 1)
        kept.append((x, y))
        del kept[:-4]
        torch.compiler.cudagraph_mark_step_begin()
        middle = first.function([x, y, W])
        inputs = [*middle, y, W]
        del middle
        (result,) = second.function(inputs)
        between = 2 * x + y * W
        assert torch.equal(result, 2 * between + y * W), step
        del result
