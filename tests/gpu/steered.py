"""Serve calls by the chain or by the branches as a test says, and measure both: what `concurrency_proof.py` does.

Encore's races are replaced by `SteeredRace`s, which serve calls as the one `Steering` says and never end. So one
compilation is measured both ways, with the same recordings, kernels and addresses.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from delayed_graphs import delayed

from optimizations.concurrency import branches as branches_module
from optimizations.concurrency.branches import BRANCHES, CHAIN, Branches
from optimizations.concurrency.hidden_memory import with_hidden_memory
from optimizations.concurrency.launch_log import Logged
from optimizations.concurrency.order import Launch, order_launches
from optimizations.race import CALLS, Race

if TYPE_CHECKING:
    from concurrency_proof import Workload

SELF_RACES = 10
DELAYED_REPLAYS = 100
ROUNDS, ROUND_CALLS = 2, 20
"""Timed calls: the number of rounds, and of calls in each with the chain and with branches."""
MOST_SPREAD = 3.0
"""A tensor in which the chain differs from itself may differ so much more among branches."""


@dataclass
class Steering:
    """The choice of what runs calls: `serve` is "chain", "branches", "race" (as Encore decides) or "self" (chain
    twice).

    Attributes:
        races: of all graphs that have branches.
        timed: events of each launch since this was emptied, by race.
    """

    serve: str = CHAIN
    races: list[SteeredRace] = field(default_factory=list)
    timed: list[tuple[SteeredRace, Any, Any]] = field(default_factory=list)

    def race(self, alternatives: Sequence[str]) -> SteeredRace:
        """Make the race of one graph."""
        assert tuple(alternatives) == (CHAIN, BRANCHES)
        self.races.append(SteeredRace(self))
        return self.races[-1]


class SteeredRace:
    """See the module. `branches` is what it is the race of; `inner` is a real race while one runs."""

    winner: str | None = None

    def __init__(self, steering: Steering) -> None:
        self.median_us: dict[str, float] = {}
        self.branches: Branches | None = None
        self.inner: Race | None = None
        self._steering = steering
        self._turn: str | None = None

    def run(self, call: Callable[[str], tuple[Any, Any]]) -> Any:
        steering = self._steering
        if self.inner is not None:
            return self.inner.run(self._against_itself(call) if steering.serve == "self" else call)
        result, events = call(BRANCHES if steering.serve == BRANCHES else CHAIN)
        if events is not None:
            steering.timed.append((self, *events))
        return result

    def _against_itself(self, call: Callable[[str], tuple[Any, Any]]) -> Callable[[str], tuple[Any, Any]]:
        """Serve both alternatives by the chain, instantiated again where branches would be."""

        def serve(name: str) -> tuple[Any, Any]:
            if name != self._turn and self.branches is not None:
                self._turn = name
                self.branches._graph.instantiate()
            return call(CHAIN)

        return serve


def compare_bits(program: Workload, steering: Steering) -> dict[str, Any]:
    """Compare the bits of the chain with its own, and with those of the branches, tensor by tensor."""

    def of(serve: str, calls: int) -> list[Mapping[str, str]]:
        steering.serve = serve
        return [program.bits() for _ in range(calls)]

    chains, branched = of(CHAIN, 3), of(BRANCHES, 2)
    steering.serve = CHAIN
    names = chains[0].keys()
    varying = {name for name in names if len({one.get(name) for one in chains}) > 1}
    same_names = all(one.keys() == names for one in (*chains, *branched))
    differing = {name for name in names - varying if any(one.get(name) != chains[0][name] for one in branched)}
    found: dict[str, Any] = {
        "tensors": len(names),
        "chain_differs_from_itself": sorted(varying),
        "branches_differ": sorted(differing),
        "same_names": same_names,
    }
    if varying:
        found["spread"] = _spread(program, steering, varying)
    found["equal"] = same_names and not differing and all(one["alike"] for one in found.get("spread", {}).values())
    return found


def _spread(program: Workload, steering: Steering, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return how far the chain is from itself in these tensors, and the branches from the chain."""

    def of(serve: str) -> Mapping[str, torch.Tensor]:
        steering.serve = serve
        return program.results()

    first, *others = (of(CHAIN) for _ in range(4))
    branched = [of(BRANCHES) for _ in range(2)]
    steering.serve = CHAIN
    found = {}
    for name in sorted(names):
        itself = max(_distance(one[name], first[name]) for one in others)
        other = max(_distance(one[name], first[name]) for one in branched)
        found[name] = {"chain": itself, "branches": other, "alike": other <= MOST_SPREAD * itself}
    return found


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    if not one.is_floating_point():
        return float((one != other).float().mean())
    one, other = one.double(), other.double()
    return float((one - other).norm() / other.norm().clamp_min(1e-300))


def compare_times(program: Workload, steering: Steering) -> dict[str, Any]:
    """Return microseconds of an iteration each way: of all graphs with branches, and of the whole iteration."""
    graphs: dict[str, list[float]] = {CHAIN: [], BRANCHES: []}
    whole: dict[str, list[float]] = {CHAIN: [], BRANCHES: []}
    for _ in range(ROUNDS):
        for serve in (CHAIN, BRANCHES):
            steering.serve = serve
            program.iterate(0)
            program.synchronize()
            for number in range(ROUND_CALLS):
                steering.timed.clear()
                begun = time.perf_counter()
                program.iterate(number)
                program.synchronize()
                whole[serve].append(1e6 * (time.perf_counter() - begun))
                graphs[serve].append(1e3 * sum(start.elapsed_time(end) for _, start, end in steering.timed))
    steering.serve = CHAIN
    steering.timed.clear()
    of_graphs = {serve: median(times) for serve, times in graphs.items()}
    of_all = {serve: median(times) for serve, times in whole.items()}
    return {
        "graphs_us": of_graphs,
        "iteration_us": of_all,
        "gain": of_graphs[CHAIN] / of_graphs[BRANCHES] if of_graphs[BRANCHES] else None,
    }


def decide(program: Workload, steering: Steering, serve: str) -> list[dict[str, Any]]:
    """Let real races decide, of chain and branches ("race") or of the chain and itself ("self")."""
    steering.serve = serve
    for one in steering.races:
        one.inner = Race((CHAIN, BRANCHES))
    for number in range(4 * (CALLS + 1)):
        program.iterate(number)
        program.synchronize()
        if all(one.inner is None or one.inner.winner is not None for one in steering.races):
            break
    inner = [one.inner for one in steering.races if one.inner is not None]
    found = [{"winner": one.winner, "median_us": one.median_us} for one in inner]
    for one in steering.races:
        one.inner = None
    steering.serve = CHAIN
    return found


def race_itself(program: Workload, steering: Steering, seconds: float) -> dict[str, int]:
    """Race the chain of each graph against itself, and count how often "branches" win."""
    won, held, end = 0, 0, time.monotonic() + seconds
    for _ in range(SELF_RACES):
        if held and time.monotonic() > end:
            break
        found = decide(program, steering, "self")
        held += len(found)
        won += sum(one["winner"] == BRANCHES for one in found)
    return {"races": held, "branches_won": won}


def replay_delayed(program: Workload, steering: Steering, seconds: float) -> dict[str, Any]:
    """Compare bits of branches with delays, drawn from 0, 1, ..., with the chain's. Varying tensors are left out."""
    steering.serve = CHAIN
    chains = [program.bits() for _ in range(3)]
    steady = [name for name in chains[0] if len({one.get(name) for one in chains}) == 1]
    steering.serve = BRANCHES
    program.bits()
    made, differing, end = 0, [], time.monotonic() + seconds
    for seed in range(DELAYED_REPLAYS):
        if time.monotonic() > end:
            break
        with ExitStack() as stack:
            for one in steering.races:
                if one.branches is not None:
                    stack.enter_context(delayed(one.branches._graph, seed))
            found = program.bits()
        made += 1
        if any(found.get(name) != chains[0][name] for name in steady):
            differing.append(seed)
    steering.serve = CHAIN
    return {"replays": made, "differing_seeds": differing, "tensors": len(steady)}


@dataclass(frozen=True, slots=True)
class Ordered:
    """The launches of one graph: as noted, with the memory that only words name, and as they were ordered."""

    logged: Sequence[Logged]
    with_hidden: Sequence[Launch]

    def paths(self) -> dict[str, int]:
        """Return lengths of the longest path, in launches: which part of the order makes it longer."""
        noted = [one.launch for one in self.logged]
        free = [Launch(one.name, one.first, one.count, one.reads, one.writes) for one in noted]
        ways = {"without_barriers": free, "declared": noted, "with_hidden_memory": self.with_hidden}
        return {name: _longest(launches) for name, launches in ways.items()}

    def hidden(self) -> dict[str, int]:
        """Return how many launches touch memory that only words name, by operator."""
        pairs = zip(self.logged, self.with_hidden, strict=True)
        return dict(Counter(new.name for old, new in pairs if new.writes != old.launch.writes))


def _longest(launches: Sequence[Launch]) -> int:
    return 1 + max(order_launches(launches).levels(), default=-1)


class NotedOrders:
    """Keeps what each graph's order was made of, in the block."""

    def __init__(self) -> None:
        self.found: list[Ordered] = []
        self._stock = with_hidden_memory

    def __enter__(self) -> NotedOrders:
        def noted(logged: Sequence[Logged], *arguments: Any) -> list[Launch]:
            launches = self._stock(logged, *arguments)
            self.found.append(Ordered(logged, launches))
            return launches

        branches_module.with_hidden_memory = noted  # type: ignore[assignment]
        return self

    def __exit__(self, *error: object) -> None:
        branches_module.with_hidden_memory = self._stock
