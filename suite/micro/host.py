"""Measure where the host's time goes in a call: until it returns, until its work is done, and in each layer.

Programs are registered workloads, or modules that hold a given number of parameters and compute next to nothing, which
show what a parameter costs. Layers are nested. They are timed in their own iterations, with a clock around each, so
that they add nothing to the times of the whole call; and in another compilation, since the code that Dynamo generates
has to call a clock. A layer is listed only if it was called in one of those iterations. On a CPU all times are those of
the calling thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import optimizations
from models import registry
from models.instance import instantiate
from models.registry import Size
from optimizations import torch_internals
from suite.measure.iteration import callable_for, iteration, set_numerics
from suite.measure.launches import graphs_of, moving
from suite.measure.modes import Mode
from suite.measure.served import CANDIDATE_OF
from suite.micro.host_cost import CALL, ENTRY, GRAPH, FullCalls, HostCost, Judged, LayerTime, least
from suite.results.errors import WrongUse

PARAMETERS = (0, 100, 1114)
"""Parameters of the modules that are measured where no workload is named; MobileBERT has 1,114, buffers included."""

SETTLING_S = 10.0
"""No longer than this: graphs read their inputs in place when they have been in use for a while."""

SETTLING = 12
"""Iterations before the first that counts: compilation, warming up, recording, and what is decided after these."""

INPUT_SETS = 4
SEED = 1337

TREES = (
    ("manager run", "CUDAGraphTreeManager", "run"),
    ("check invariants", "CUDAGraphNode", "check_invariants"),
    ("node run", "CUDAGraphNode", "run"),
    ("copy inputs", "CUDAGraphNode", "_copy_inputs_and_remove_from_src"),
    ("reconstruct outputs", "CUDAGraphNode", "reconstruct_outputs"),
    ("run graph", "CUDAGraphNode", "run_graph"),
)
"""Layers inside of `GRAPH` that stock CUDAGraph Trees have: class and method."""


@dataclass(frozen=True, slots=True)
class Case:
    """Hold what is measured: a program, in a mode, on a device. `lean` None leaves the mode's options as they are."""

    program: str
    mode: Mode
    lean: bool | None = None
    device: str = "cuda"
    size: Size = "full"
    calls: int = 200

    @property
    def now_ns(self) -> Callable[[], int]:
        """Return the clock: of the machine, or on a CPU of the calling thread."""
        return time.thread_time_ns if self.device == "cpu" else time.perf_counter_ns

    def __str__(self) -> str:
        lean = "" if self.lean is None else f", lean {'on' if self.lean else 'off'}"
        return f"{self.program} in mode {self.mode.name}{lean}"

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the mode's backend."""
        return {**self.mode.options, **({} if self.lean is None else {"lean": self.lean})}


def cases(programs: list[str], modes: list[Mode], *, device: str, size: Size, calls: int) -> list[Case]:
    """Return each program in each mode, Encore's with `lean` and without."""
    made = []
    for program in programs:
        for mode in modes:
            for lean in (True, False) if mode.backend == "encore" else (None,):
                made.append(Case(program, mode, lean, device, size, calls))
    return made


def synthetic(parameters: int) -> str:
    """Return the name of the module with so many parameters."""
    return f"parameters-{parameters}"


def require_program(name: str) -> None:
    """Check that a program of this name can be measured.

    Raises:
        WrongUse: it is neither a workload nor a module of so many parameters.
    """
    if _parameters_of(name) is None:
        try:
            registry.find(name)
        except registry.UnknownWorkload as error:
            raise WrongUse(f"{error}; or {synthetic(100)} for a module with 100 parameters") from error


def _parameters_of(name: str) -> int | None:
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() and name == synthetic(int(number)) else None


@functools.cache
def _touch() -> Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]:
    """Return an operator that takes any number of tensors and reads one: many parameters and one small kernel."""
    library = torch.library.Library("encore_micro", "FRAGMENT")
    library.define("touch(Tensor x, Tensor[] held) -> Tensor")
    library.impl("touch", lambda x, held: x + 1, "CompositeExplicitAutograd")
    library.impl("touch", lambda x, held: torch.empty_like(x), "Meta")
    touch: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor] = torch.ops.encore_micro.touch.default
    touch.library = library  # type: ignore[attr-defined]  # it lives as long as its operators are wanted
    return touch


class Parameters(nn.Module):
    """Hold parameters in submodules of two, and pass all of them to one operator."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.Linear(1, 1) for _ in range(parameters // 2))
        if parameters % 2:
            self.last = nn.Parameter(torch.zeros(1))
        self.touch = _touch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held: list[Any] = [tensor for pair in self.pairs for tensor in (pair.weight, pair.bias)]
        if hasattr(self, "last"):
            held.append(self.last)
        return self.touch(x, held)


@dataclass(slots=True)
class _Clocks:
    """Keep nanoseconds of each iteration, and calls, by layer, while `on`. `wait`: after each of these calls, and where
    `waits_before` right before it."""

    now_ns: Callable[[], int]
    wait: Callable[[], Any] | None = None
    waits_before: bool = True
    on: bool = False
    iterations: int = 0
    spent: dict[str, list[int]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)

    def begin(self) -> None:
        self.on = True
        self.iterations += 1

    def take(self, iterations: int, step: Callable[[int], Any], before: Callable[[], Any]) -> None:
        """Run so many iterations by their numbers, `before` called before each."""
        for index in range(iterations):
            before()
            self.begin()
            step(index)
            self.on = False

    def of(self, layer: str) -> list[int]:
        """Return what was spent in a layer in each iteration; empty if it was called in none."""
        spent = self.spent.get(layer)
        return [] if spent is None else [*spent, *[0] * (self.iterations - len(spent))]

    def around(self, layer: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*arguments: Any, **keywords: Any) -> Any:
            if not self.on:
                return function(*arguments, **keywords)
            if self.wait is not None and self.waits_before:
                self.wait()
            start = self.now_ns()
            try:
                result = function(*arguments, **keywords)
                if self.wait is not None:
                    self.wait()
                return result
            finally:
                took_ns = self.now_ns() - start
                spent = self.spent.setdefault(layer, [])
                spent.extend([0] * (self.iterations - len(spent)))
                spent[-1] += took_ns
                self.calls[layer] += 1

        return clocked


@dataclass(frozen=True, slots=True)
class _Program:
    module: nn.Module
    iterate: Callable[[Callable[..., Any]], Callable[[int], Any]]
    """Makes, of what is called in the module's place, an iteration by its number."""


def measure(case: Case) -> HostCost:
    """Measure one case. Everything compiled before in this process is forgotten."""
    program = _program(case)
    synchronize = torch.cuda.synchronize if case.device == "cuda" else lambda: None
    _forget()
    step = program.iterate(callable_for(_with_options(case), program.module))
    _settle(step, synchronize)
    before = _Ways.now()
    issue, (whole, *others) = _sample(step, case.calls, case.now_ns, _waits(case.device))
    ways = _Ways.now().since(before)
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        without_guards, _ = _sample(step, case.calls // 2, case.now_ns, [synchronize])
    judged = _judged()
    calls = case.calls if case.mode.uses_cuda_graphs else 1
    floor = graphs_of(moving(step), synchronize, calls) if case.device == "cuda" else []
    del step
    _forget()
    layers, inside, inside_behind_idle = _inner_times(case, program, synchronize)
    _forget()
    return HostCost(
        program=case.program,
        mode=case.mode.name,
        lean=case.lean,
        parameters=sum(1 for _ in program.module.parameters()),
        buffers=sum(1 for _ in program.module.buffers()),
        issue_us=issue,
        whole_us=whole,
        without_guards_us=without_guards,
        floor_us=[one.us for one in floor],
        layers=layers,
        replays=ways.replays,
        steady_replays=ways.steady_replays,
        full_calls=tuple(FullCalls(reason=reason, calls=calls) for reason, calls in ways.full_calls.items()),
        whole_by_stream_us=tuple(others[0]) if others else (),
        whole_by_event_us=tuple(others[1]) if others else (),
        judged=judged,
        inside_us=inside,
        inside_behind_idle_us=inside_behind_idle,
    )


@dataclass(frozen=True, slots=True)
class _Ways:
    """Read what Encore's counters say of the calls so far."""

    replays: int
    steady_replays: int
    full_calls: Counter[str]

    @classmethod
    def now(cls) -> _Ways:
        full_calls: Counter[str] = Counter()
        graphs = optimizations.report()
        for way in (way for graph in graphs for way in graph.full_ways):
            full_calls[way.reason] += way.calls
        recordings = [one for graph in graphs for one in graph.recordings]
        return cls(sum(one.replays for one in recordings), sum(one.steady_replays for one in recordings), full_calls)

    def since(self, before: _Ways) -> _Ways:
        return _Ways(
            self.replays - before.replays,
            self.steady_replays - before.steady_replays,
            self.full_calls - before.full_calls,
        )


def _with_options(case: Case) -> Mode:
    mode = case.mode
    return Mode(mode.name, mode.summary, mode.baselines, mode.backend, case.options, mode.uses_cuda_graphs)


def _program(case: Case) -> _Program:
    parameters = _parameters_of(case.program)
    if parameters is not None:
        module = Parameters(parameters).to(case.device).eval()
        sets = [torch.ones(8, device=case.device) * index for index in range(INPUT_SETS)]

        def synthetic_iteration(call: Callable[..., Any]) -> Callable[[int], Any]:
            def step(index: int) -> Any:
                if case.device == "cuda":
                    torch.compiler.cudagraph_mark_step_begin()
                with torch.no_grad():
                    return call(sets[index % INPUT_SETS])

            return step

        return _Program(module, synthetic_iteration)
    workload = registry.find(case.program)
    set_numerics()
    instance = instantiate(workload, device=case.device, size=case.size, seed=SEED)
    inputs = [instance.inputs(index) for index in range(INPUT_SETS)]

    def workload_iteration(call: Callable[..., Any]) -> Callable[[int], Any]:
        run = iteration(instance, call, marks_steps=case.device == "cuda")
        return lambda index: run(inputs[index % INPUT_SETS])

    return _Program(instance.module, workload_iteration)


def _settle(step: Callable[[int], Any], synchronize: Callable[[], Any]) -> None:
    for index in range(SETTLING):
        step(index)
        synchronize()
    ends, index = time.monotonic() + SETTLING_S, SETTLING
    while not optimizations.settled() and time.monotonic() < ends:
        step(index)
        synchronize()
        index += 1


def _waits(device: str) -> list[Callable[[], Any]]:
    """Return functions that wait for a call: for the device, and on a GPU for its stream, and for an event after it."""
    if device == "cpu":
        return [lambda: None]
    event: Any = torch.cuda.Event()

    def by_event() -> None:
        event.record()
        event.synchronize()

    return [torch.cuda.synchronize, lambda: torch.cuda.current_stream().synchronize(), by_event]


def _sample(
    step: Callable[[int], Any], calls: int, now_ns: Callable[[], int], waits: Sequence[Callable[[], Any]]
) -> tuple[list[float], list[list[float]]]:
    """Time so many calls for each function that waits, alternately: until the call returned (first one only), and until
    it was over."""
    issue: list[float] = []
    whole: list[list[float]] = [[] for _ in waits]
    for index in range(calls * len(waits)):
        turn = index % len(waits)
        waits[0]()
        start = now_ns()
        step(index)
        returned = now_ns()
        waits[turn]()
        whole[turn].append((now_ns() - start) / 1e3)
        if turn == 0:
            issue.append((returned - start) / 1e3)
    return issue, whole


def _judged() -> tuple[Judged, ...]:
    return tuple(
        Judged(
            kept=CANDIDATE_OF[one.decision],
            median_us={CANDIDATE_OF[name]: microseconds for name, microseconds in one.median_us},
        )
        for graph in optimizations.report()
        for one in graph.selection
        if one.decision is not None
    )


def _inner_times(
    case: Case, program: _Program, synchronize: Callable[[], Any]
) -> tuple[list[LayerTime], tuple[float, ...], tuple[float, ...]]:
    """Return times of each layer, and of graphs' functions waited for: with a wait right before each, and with none."""
    wait = _waits(case.device)[-1]
    clocks = _Clocks(case.now_ns)
    inside = [_Clocks(case.now_ns, wait, waits_before=before) for before in (True, False)]

    def clocked(graph: Callable[..., Any]) -> Callable[..., Any]:
        for one in (clocks, *inside):
            graph = one.around(GRAPH, graph)
        return graph

    with _clocked_graphs(clocked), _clocked_trees(clocks):
        call: Callable[..., Any] = program.module
        if case.mode.backend is not None:
            call = torch.compile(program.module, backend=_clocked_backend(case, clocks))
        step = program.iterate(clocks.around(CALL, call))
        _settle(step, synchronize)
        clocks.take(case.calls, step, synchronize)
        synchronize()
        for one in inside:
            one.take(case.calls, step, wait)
    layers = [_layer_time(layer, clocks.of(layer), clocks.calls[layer]) for layer in clocks.spent]
    waited, behind_idle = (tuple(spent / 1e3 for spent in one.of(GRAPH)) for one in inside)
    return layers, waited, behind_idle


def _layer_time(layer: str, spent_ns: list[int], calls: int) -> LayerTime:
    return LayerTime(
        layer=layer,
        host_us=statistics.median(spent_ns) / 1e3,
        fastest_us=least(spent_ns) / 1e3,
        calls=calls / len(spent_ns),
    )


def _clocked_backend(case: Case, clocks: _Clocks) -> Callable[..., Any]:
    """Return the mode's backend, with a clock around each function that it gives to Dynamo."""

    def backend(graph_module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        if case.mode.backend == "encore":
            from optimizations.backend import encore

            compiled = encore(graph_module, inputs, options=case.options)
        else:
            compiled = torch_internals.compile_fx.compile_fx(graph_module, inputs, config_patches=case.options)
        return clocks.around(ENTRY, compiled)

    return backend


@contextlib.contextmanager
def _clocked_graphs(clocked: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Put a clock around the function of each graph that is compiled in the block."""
    owner, attribute = torch_internals.holder_of("post_compile")
    stock = getattr(owner, attribute)

    def post_compile(graph: Any, *arguments: Any, **keywords: Any) -> Any:
        result = stock(graph, *arguments, **keywords)
        graph.current_callable = clocked(graph.current_callable)
        return result

    with torch_internals.replaced("post_compile", post_compile):
        yield


@contextlib.contextmanager
def _clocked_trees(clocks: _Clocks) -> Iterator[None]:
    trees = torch_internals.cudagraph_trees
    with contextlib.ExitStack() as stack:
        for layer, kind, method in TREES:
            owner = getattr(trees, kind)
            clocked = clocks.around(layer, getattr(owner, method))
            stack.enter_context(torch_internals.replaced_attribute(owner, method, _method(clocked)))
        yield


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(this: Any, *arguments: Any, **keywords: Any) -> Any:
        return function(this, *arguments, **keywords)

    return method


def _forget() -> None:
    torch_internals.reset_dynamo()
    optimizations.reset()
    gc.collect()
