"""Time a training iteration as few or many CUDA graphs, side by side: what `torch.compile` captures, the module as one
callable, the whole step by `optimizations.graph_step`, and the whole step captured by hand in the same process.

The capture by hand is the reference: the same compiled iteration, warmed up on a side stream, recorded with
`torch.cuda.graph`, launched bare and with one copy for each input. Nothing general can be faster with these kernels.
Time is the host's from the call until the GPU is done, each iteration waited for. Where an iteration launches graphs,
what the host does before its launches, in them and after them is taken in other iterations, some of which wait for the
GPU before and some do not.

Those that capture the whole step are timed once more, side by side (`in_turns`), and these times count. Memory is that
of each way alone.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

import optimizations
from models import registry
from models.instance import Instance, instantiate
from models.nests import tensors_of
from models.registry import Inputs, Size
from optimizations import torch_internals
from optimizations.byte_units import format_bytes
from suite.measure.graphs import recorded_graphs
from suite.measure.iteration import callable_for, iteration, set_numerics
from suite.measure.launches import HostParts, host_parts
from suite.measure.modes import Mode, select_modes
from suite.measure.profiling import load_profiler, profile_iterations
from suite.micro.in_turns import timed_us, times_in_turns
from suite.results.errors import WrongUse
from suite.results.schema import Environment, Record
from suite.worker.captured_iteration import host_draws

COMPILED = ("compile", "graph", "indirection")
"""Modes whose graphs end where the module ends."""
CALLABLES, STEP, BY_HAND, BARE = "callables", "step", "by hand", "by hand, bare"
WAYS = (*COMPILED, CALLABLES, STEP, BY_HAND, BARE)
WHOLE = (STEP, BY_HAND, BARE)
"""Ways that capture the whole step."""

WARM_UP = 8
INPUT_SETS = 3
SEED = 1337
NONE = "\N{EN DASH}"


class StepCost(Record):
    """Hold the cost of one way of running a workload's iteration.

    Attributes:
        with_optimizer: whether the iteration ends with the optimizer's step.
        whole_us: each sample; empty where the way is refused.
        reserved_bytes: most memory that PyTorch reserved while the iteration was warmed up and timed.
        graphs: CUDA graphs there are for the iteration, None where the way is refused.
        refused: why there is no time.
        host: what of an iteration is the host's, the device having nothing to do before; None where it launches no
            graph, and in older files.
        host_at_work: the same in a loop that waits for nothing, so that the device is at work on iterations before.
        in_turns: whether its times were taken alternately with others that capture the whole step; not in older files.
        kernels: which kernels an iteration runs, how often each, and `kernel_us` their time in all; None where they
            were not profiled.
    """

    workload: str
    with_optimizer: bool
    way: str
    whole_us: list[float]
    reserved_bytes: int | None
    graphs: int | None
    refused: str | None
    host: HostParts | None = None
    host_at_work: HostParts | None = None
    in_turns: bool = False
    kernels: dict[str, int] | None = None
    kernel_us: float | None = None

    @property
    def median_us(self) -> float | None:
        return statistics.median(self.whole_us) if self.whole_us else None


class StepRun(Record):
    """Hold `step.json`."""

    micro_schema_version: int
    environment: Environment
    size: str
    costs: list[StepCost]


@dataclass(slots=True)
class Made:
    """Hold an iteration that is ready to be timed: `call(index)`; `free` gives its graphs back.

    `held`: what its graphs read and write and the call does not refer to, such as an optimizer's state. PyTorch gives
    the memory of what is gone to others, or back, and a graph would write there all the same.
    """

    call: Callable[[int], Any]
    graphs: int | None = None
    refused: str | None = None
    free: Callable[[], None] = lambda: None
    held: object = None


def training_workloads(names: list[str] | None) -> list[str]:
    """Return these workloads, or all that train.

    Raises:
        WrongUse: one is unknown, or is for inference.
    """
    if not names:
        return [workload.acronym for workload in registry.workloads().values() if workload.task == "training"]
    for name in names:
        try:
            workload = registry.find(name)
        except registry.UnknownWorkload as error:
            raise WrongUse(str(error)) from error
        if workload.task != "training":
            raise WrongUse(f"{name} is a workload for inference; `encore list` shows which ones train")
    return names


def chosen_ways(names: list[str] | None) -> list[str]:
    """Return these ways in the order of `WAYS`, or all.

    Raises:
        WrongUse: one is unknown.
    """
    for name in names or ():
        if name not in WAYS:
            raise WrongUse(f"{name!r} is no way to run a training step; there are {', '.join(map(repr, WAYS))}")
    return [way for way in WAYS if not names or way in names]


@dataclass(frozen=True, slots=True)
class Program:
    """Hold a workload as a mode compiles it, which several ways run."""

    mode: Mode
    instance: Instance
    sets: list[Inputs]
    compiled: Callable[..., Any]


def measure(
    name: str, *, size: Size, samples: int, ways: Sequence[str] = WAYS, profiled: bool = False
) -> Iterator[StepCost]:
    """Yield a cost for each of these ways, without and with the optimizer.

    Ways that run the same compiled program share it: compiling takes most of the time. Those that capture the whole
    step come last; the costs of these come again, timed alternately. `profiled`: afterwards each is made once more, for
    its kernels; the cost comes again then, too. A profiler makes all later launches slower, so the programs are
    compiled again.
    """
    known = {}
    for cost in _each(
        name,
        ways,
        size,
        lambda program, way, optimizer: _cost(name, program, way, optimizer, samples),
        lambda program, costs: _in_turns(program, costs, samples),
    ):
        known[cost.way, cost.with_optimizer] = cost
        yield cost
    if profiled:
        yield from _each(name, ways, size, lambda program, way, optimizer: _seen(program, known[way, optimizer]))


def _each(
    name: str,
    ways: Sequence[str],
    size: Size,
    cost_of: Callable[[Callable[[], Program], str, bool], StepCost],
    again: Callable[[Callable[[], Program], list[StepCost]], Iterator[StepCost]] | None = None,
) -> Iterator[StepCost]:
    """Yield the cost of each way, and after those of a program with or without the optimizer, what is timed again."""
    for mode in dict.fromkeys(_mode_of(way) for way in ways):
        _forget()
        program = functools.cache(functools.partial(_compiled, name, mode, size))
        for with_optimizer in (False, True):
            costs = []
            for way in ways:
                if _mode_of(way) == mode:
                    costs.append(cost_of(program, way, with_optimizer))
                    yield costs[-1]
            if again is not None:
                yield from again(program, costs)
        del program


def _mode_of(way: str) -> str:
    return way if way in COMPILED else "compile"


def _compiled(name: str, mode_name: str, size: Size) -> Program:
    set_numerics()
    (mode,) = select_modes([mode_name])
    instance = instantiate(registry.find(name), size=size, device="cuda", seed=SEED)
    sets = [instance.inputs(index) for index in range(INPUT_SETS)]
    compiled = callable_for(mode, instance.module)
    # What compiling takes, such as what kernels are tuned in, would count as memory of the way that comes first.
    iteration(instance, compiled, marks_steps=mode_name in COMPILED, optimizer=None)(sets[0])
    return Program(mode, instance, sets, compiled)


def _cost(name: str, program: Callable[[], Program], way: str, with_optimizer: bool, samples: int) -> StepCost:
    cost = StepCost(
        workload=name,
        with_optimizer=with_optimizer,
        way=way,
        whole_us=[],
        reserved_bytes=None,
        graphs=None,
        refused=None,
    )
    found: dict[str, Any] = {}
    try:
        _clear(program())
        torch.cuda.reset_peak_memory_stats()
        made = _make(program(), way, with_optimizer)
        found["refused"] = made.refused
        if made.refused is None:
            found |= {"whole_us": _timed(made.call, samples), "host": _parts(made, samples), "graphs": made.graphs}
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        if made.refused is None:
            found["host_at_work"] = _parts(made, samples, at_work=True)
        made.free()
    except torch.OutOfMemoryError as error:
        found["refused"] = f"out of memory: {_first_line(error)}"  # what was timed until then is kept
    except Exception as error:  # of the program, or of a capture by hand; the other ways are measured all the same
        found["refused"] = f"{type(error).__name__}: {_first_line(error)}"
        _leave_capture()
    return cost.model_copy(update=found)


def _in_turns(program: Callable[[], Program], costs: Sequence[StepCost], samples: int) -> Iterator[StepCost]:
    """Time the ways that capture the whole step once more, alternately, if there are several."""
    whole = [cost for cost in costs if cost.way in WHOLE and cost.refused is None]
    if len(whole) < 2:
        return
    made: list[Made] = []
    try:
        _clear(program())
        for cost in whole:
            made.append(_make(program(), cost.way, cost.with_optimizer))
            if made[-1].refused is not None:
                raise RuntimeError(made[-1].refused)
        times = times_in_turns([one.call for one in made], torch.cuda.synchronize, samples)
    except Exception as error:  # too large side by side, as a rule: the times of each alone are known
        names = ", ".join(cost.way for cost in whole)
        print(f"{whole[0].workload}: {names} are not timed in turns, {type(error).__name__}: {_first_line(error)}")
        _leave_capture()
        return
    finally:
        for one in made:
            with contextlib.suppress(RuntimeError):  # after an error of the device each call to it raises that error
                one.free()
    for cost, found in zip(whole, times, strict=True):
        update = {"whole_us": found.whole_us, "host": found.host, "host_at_work": found.host_at_work}
        yield cost.model_copy(update=update | {"in_turns": True})


def _parts(made: Made, samples: int, *, at_work: bool = False) -> HostParts | None:
    return host_parts(made.call, torch.cuda.synchronize, samples, at_work=at_work)


def _seen(program: Callable[[], Program], cost: StepCost) -> StepCost:
    """Return the cost with the kernels of an iteration; as it is where they cannot be seen."""
    if cost.refused is not None:
        return cost
    try:
        _clear(program())
        made = _make(program(), cost.way, cost.with_optimizer)
        profile = None
        if made.refused is None:
            load_profiler(made.call)
            profile = profile_iterations(made.call)
        made.free()
    except Exception as error:  # the time is known all the same
        print(f"{cost.workload}, {cost.way}: not profiled, {type(error).__name__}: {_first_line(error)}")
        _leave_capture()
        return cost
    if profile is None:
        return cost
    return cost.model_copy(update={"kernels": profile.kernels, "kernel_us": profile.kernel_time_us})


def _make(program: Program, way: str, with_optimizer: bool) -> Made:
    instance, sets, compiled = program.instance, program.sets, program.compiled
    optimizer = instance.optimizer() if with_optimizer else None
    if way == CALLABLES:
        return _callables(instance, compiled, sets, optimizer)
    iterate = iteration(instance, compiled, marks_steps=way in COMPILED, optimizer=optimizer)
    if way == STEP:
        return _step(instance, iterate, sets)
    if way in (BY_HAND, BARE):
        return _by_hand(instance, iterate, sets, copies=way == BY_HAND)
    for index in range(WARM_UP):
        iterate(sets[index % INPUT_SETS])
    graphs = len(recorded_graphs(instance.device)) if program.mode.uses_cuda_graphs else 0
    return Made(lambda index: iterate(sets[index % INPUT_SETS]), graphs=graphs)


def _step(instance: Instance, iterate: Callable[[Inputs], Any], sets: list[Inputs]) -> Made:
    def step(inputs: Inputs) -> torch.Tensor:
        loss: torch.Tensor = iterate(inputs).loss
        return loss

    graphed = optimizations.graph_step(step, host_draws=host_draws(instance.workload), check_every=None)
    for index in range(WARM_UP):
        graphed(sets[index % INPUT_SETS])
    report = graphed.report()
    if not report.replays:
        return Made(
            lambda index: None,
            refused="; ".join(map(str, report.refusals)) or "nothing was recorded",
            free=graphed.close,
        )
    return Made(lambda index: graphed(sets[index % INPUT_SETS]), graphs=1, free=graphed.close)


def _callables(
    instance: Instance, compiled: Callable[..., Any], sets: list[Inputs], optimizer: torch.optim.Optimizer | None
) -> Made:
    """Capture the module as one callable, forward and loss; backward through autograd; the optimizer as it is."""

    autocast, loss_of = instance.autocast, instance.loss

    def forward(inputs: Inputs) -> torch.Tensor:
        with autocast():
            return loss_of(compiled(*inputs.args, **inputs.kwargs))

    try:
        call = optimizations.graph_callables(forward, [(sets[0],)], host_draws=host_draws(instance.workload))
    except RuntimeError as error:
        return Made(lambda index: None, refused=f"{type(error).__name__}: {_first_line(error)}")
    parameters = list(instance.module.parameters())

    def iterate(index: int) -> None:
        for parameter in parameters:
            parameter.grad = None
        call[0](sets[index % INPUT_SETS]).backward()
        if optimizer is not None:
            optimizer.step()

    for index in range(WARM_UP):
        iterate(index)
    if call.calls_without_graph:
        return Made(iterate, refused="calls run without the graphs: what they use changes", free=call.close)
    return Made(iterate, graphs=2, free=call.close)


def _by_hand(instance: Instance, iterate: Callable[[Inputs], Any], sets: list[Inputs], *, copies: bool) -> Made:
    """Capture the iteration as PyTorch's notes on CUDA graphs tell users to."""
    static = instance.inputs(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            iterate(static)
    torch.cuda.synchronize()
    for parameter in instance.module.parameters():
        parameter.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outcome = iterate(static)
    targets = list(tensors_of((static.args, static.kwargs)))
    sources = [list(tensors_of((inputs.args, inputs.kwargs))) for inputs in sets]

    def launch(index: int) -> Any:
        if copies:
            for target, source in zip(targets, sources[index % INPUT_SETS], strict=True):
                target.copy_(source, non_blocking=True)
        graph.replay()
        return outcome

    return Made(launch, graphs=1, free=graph.reset, held=iterate)


def _timed(call: Callable[[int], Any], samples: int) -> list[float]:
    """Return microseconds from each call until the GPU is done."""
    return timed_us(call, torch.cuda.synchronize, samples)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _leave_capture() -> None:
    """Run a capture that succeeds: it takes PyTorch's random numbers out of one that the driver ended."""
    with contextlib.suppress(RuntimeError, AssertionError):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.zeros(1, device="cuda")
        graph.reset()


def _clear(program: Program) -> None:
    """Free what the way before this one left: gradients, which may be a graph's, and memory that nothing uses."""
    for parameter in program.instance.module.parameters():
        parameter.grad = None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _forget() -> None:
    optimizations.reset()
    torch_internals.reset_dynamo()
    gc.collect()
    torch.cuda.empty_cache()


def table(run: StepRun) -> Table:
    """Show ways side by side, as Megatron's documentation does for its three implementations: time, memory, graphs."""
    shown = Table(
        "workload",
        "way",
        "µs per iteration",
        "times the one by hand",
        "host before, in and behind launches",
        "GPU at work",
        "reserved",
        "graphs",
        "kernels",
        "µs of kernels",
        "refused",
        title=f"CUDA graphs of a training iteration, {run.environment.gpu.name if run.environment.gpu else 'no GPU'}",
        title_justify="left",
    )
    by_hand = {(cost.workload, cost.with_optimizer): cost.median_us for cost in run.costs if cost.way == BY_HAND}
    workloads = list(dict.fromkeys(cost.workload for cost in run.costs))
    for cost in sorted(
        run.costs, key=lambda cost: (workloads.index(cost.workload), cost.with_optimizer, WAYS.index(cost.way))
    ):
        floor, median = by_hand.get((cost.workload, cost.with_optimizer)), cost.median_us
        shown.add_row(
            cost.workload + (" with optimizer" if cost.with_optimizer else ""),
            cost.way,
            NONE if median is None else f"{median:,.0f}",
            NONE if median is None or not floor else f"{median / floor:.2f}",
            _in_words(cost.host),
            _in_words(cost.host_at_work),
            NONE if cost.reserved_bytes is None else format_bytes(cost.reserved_bytes),
            NONE if cost.graphs is None else str(cost.graphs),
            NONE if cost.kernels is None else f"{sum(cost.kernels.values()):,}",
            NONE if cost.kernel_us is None else f"{cost.kernel_us:,.0f}",
            cost.refused or "",
        )
    return shown


def _in_words(host: HostParts | None) -> str:
    """Return microseconds of the host as text; those between several launches count as before."""
    if host is None:
        return NONE
    return f"{host.before_us + host.between_us:,.0f}, {host.launch_us:,.0f}, {host.behind_us:,.0f}"
