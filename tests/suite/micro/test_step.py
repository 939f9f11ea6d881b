"""`encore micro step`: which workloads it takes, and its table."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import itertools
import random
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures.synthetic_results import environment
from rich.console import Console
from simulated_gpu.operators import CpuDevice
from tiny_workloads import instance_of

import optimizations
from models import registry
from models.instance import instantiate
from optimizations.capture.callables.graph_callables import graph_callables
from optimizations.capture.step.graphed_step import GraphedStep
from suite.cli.main import main
from suite.measure.launches import HostParts
from suite.measure.modes import MODES
from suite.micro import step
from suite.micro.in_turns import Times
from suite.micro.step import (
    BARE,
    BY_HAND,
    NONE,
    STEP,
    StepCost,
    StepRun,
    chosen_ways,
    table,
    training_workloads,
)
from suite.results.errors import EXIT_WRONG_USE, WrongUse


def test_default_is_all_training_workloads() -> None:
    assert "DCGAN" in training_workloads(None)
    assert all(registry.find(name).task == "training" for name in training_workloads(None))
    with pytest.raises(WrongUse, match="EOS is a workload for inference"):
        training_workloads(["EOS"])


def test_wrong_use_has_its_exit_code_and_names_the_workload(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["micro", "step", "NOPE"])
    assert ended.value.code == EXIT_WRONG_USE
    assert "unknown workload 'NOPE'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["micro", "step", "DCGAN", "--way", "step", "--way", "by foot"])
    assert ended.value.code == EXIT_WRONG_USE
    assert "'by foot' is no way to run a training step" in capsys.readouterr().err


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modes a program was compiled with; there is no GPU."""
    modes: list[str] = []

    def compile_it(name: str, mode: str, size: Any) -> step.Program:
        modes.append(mode)
        instance = instantiate(registry.find(name), size=size, device="cpu", seed=1)
        return step.Program(MODES[mode], instance, [], instance.module)

    monkeypatch.setattr(step, "_compiled", compile_it)
    monkeypatch.setattr(step, "_timed", lambda call, samples: [1.0] * samples)
    monkeypatch.setattr(step, "_forget", lambda: None)
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 7)
    return modes


def test_failing_way_is_a_row_and_others_are_measured(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def make(program: step.Program, way: str, with_optimizer: bool) -> step.Made:
        made.append((program.mode.name, with_optimizer, way))
        if way == BY_HAND:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        if way == "graph":
            raise torch.OutOfMemoryError("too large")
        return step.Made(lambda index: None, graphs=1, refused="no graph" if way == STEP else None)

    made: list[tuple[str, bool, str]] = []
    monkeypatch.setattr(step, "_make", make)
    costs = {cost.way: cost for cost in step.measure("DCGAN", size="tiny", samples=2) if not cost.with_optimizer}
    assert set(costs) == set(step.WAYS)
    assert costs[BY_HAND].refused == "RuntimeError: operation not permitted when stream is capturing"
    assert costs["graph"].refused == "out of memory: too large"
    assert costs[BARE].whole_us == [1.0, 1.0] and costs[BARE].graphs == 1
    assert costs[STEP].refused == "no graph" and costs[STEP].graphs is None and not costs[STEP].whole_us
    assert {mode for mode, _, _ in made} == set(compiled) == set(step.COMPILED)
    assert len(compiled) == 3, "a program is compiled once for all ways that run it"
    whole = [step.CALLABLES, STEP, BY_HAND, BARE]
    assert [way for mode, _, way in made if mode == "compile"] == ["compile", *whole] * 2


def test_times_are_kept_where_a_way_fails_after_them(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_make", lambda *given: step.Made(lambda index: None, graphs=1))

    def parts(made: step.Made, samples: int, *, at_work: bool = False) -> HostParts | None:
        if at_work:
            raise RuntimeError("an illegal memory access was encountered")
        return None

    monkeypatch.setattr(step, "_parts", parts)
    monkeypatch.setattr(step, "_leave_capture", lambda: None)
    first = next(step.measure("DCGAN", size="tiny", samples=2, ways=[STEP]))
    assert first.whole_us == [1.0, 1.0] and first.reserved_bytes == 7
    assert first.refused == "RuntimeError: an illegal memory access was encountered"


def test_kernels_are_counted_behind_all_that_is_timed(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def make(program: step.Program, way: str, with_optimizer: bool) -> step.Made:
        order.append(f"make {way}")
        return step.Made(lambda index: None, graphs=1, refused="no graph" if way == STEP else None)

    def profile(call: Any) -> Any:
        order.append("profile")
        if order.count("profile") == 2:
            raise RuntimeError("the profiler is taken")
        return SimpleNamespace(kernels={"add": 2, "mul": 1}, kernel_time_us=4.5)

    monkeypatch.setattr(step, "_make", make)
    monkeypatch.setattr(step, "load_profiler", lambda call: order.append("load"))
    monkeypatch.setattr(step, "profile_iterations", profile)
    monkeypatch.setattr(step, "_leave_capture", lambda: None)
    found = list(step.measure("DCGAN", size="tiny", samples=2, ways=[STEP, BY_HAND], profiled=True))
    assert [(one.way, one.with_optimizer) for one in found[:4]] == [(one.way, one.with_optimizer) for one in found[4:]]
    assert all(one.kernels is None for one in found[:4])
    behind = {(one.way, one.with_optimizer): one for one in found[4:]}
    assert behind[BY_HAND, False].kernels == {"add": 2, "mul": 1} and behind[BY_HAND, False].kernel_us == 4.5
    assert behind[BY_HAND, False].whole_us == [1.0, 1.0]
    assert behind[BY_HAND, True].kernels is None and behind[BY_HAND, True].whole_us == [1.0, 1.0]
    assert behind[STEP, False].refused == "no graph"
    assert order[:4] == ["make step", "make by hand"] * 2
    assert order[4:] == ["make by hand", "load", "profile"] * 2, "what was refused is not made again"
    assert compiled == ["compile"] * 2, "once for the times, and once for the kernels"


def test_a_program_that_cannot_be_built_is_a_row_for_each_way(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "_compiled", lambda name, mode, size: 1 / 0)
    (first, *others) = step.measure("DCGAN", size="tiny", samples=2, ways=[STEP, BY_HAND])
    assert first.refused == "ZeroDivisionError: division by zero"
    assert [(cost.way, cost.with_optimizer) for cost in others] == [(BY_HAND, False), (STEP, True), (BY_HAND, True)]


def test_a_program_has_run_once_before_a_ways_memory_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what compiling takes counts for the way that comes first."""
    calls: list[str] = []

    def callable_for(mode: Any, module: torch.nn.Module) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(mode.name)
            return module(*args, **kwargs)

        return call

    monkeypatch.setattr(step, "instantiate", lambda *given, **named: instantiate(*given, **named | {"device": "cpu"}))
    monkeypatch.setattr(step, "callable_for", callable_for)
    monkeypatch.setattr(step, "set_numerics", lambda: None)
    program = step._compiled("DCGAN", "compile", "tiny")
    assert calls == ["compile"]
    assert all(parameter.grad is not None for parameter in program.instance.module.parameters()), "backward, too"


class Draws(torch.nn.Linear):
    """As LayerDrop does at rate 0."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * (2 if random.random() < 0 else 1)


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("way", [STEP, step.CALLABLES])
@pytest.mark.parametrize("unused", [False, True])
def test_harmless_host_draws_are_captured_where_declared(
    way: str, unused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CpuDevice()
    monkeypatch.setattr(optimizations, "graph_step", functools.partial(GraphedStep, device=device))
    monkeypatch.setattr(optimizations, "graph_callables", functools.partial(graph_callables, device=device))
    instance = instance_of(
        lambda: Draws(8, 4), task="training", loss=lambda output: output.square().mean(), host_draws_unused=unused
    )
    sets = [instance.inputs(index) for index in range(step.INPUT_SETS)]
    made = step._make(step.Program(MODES["compile"], instance, sets, instance.module), way, False)
    if unused:
        assert made.refused is None and made.graphs == (1 if way == STEP else 2)
    else:
        assert made.refused is not None and "draws random numbers on the host (random)" in made.refused
    assert any(graph.replays for graph in device.graphs) is unused


def test_host_work_around_launches_counts_as_cost(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = SimpleNamespace()
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None)
    replay = torch.cuda.CUDAGraph.replay

    def make(program: step.Program, way: str, with_optimizer: bool) -> step.Made:
        return step.Made(lambda index: torch.cuda.CUDAGraph.replay(graph) if way == STEP else None)  # type: ignore[arg-type]

    monkeypatch.setattr(step, "_make", make)
    costs = {cost.way: cost for cost in step.measure("DCGAN", size="tiny", samples=3, ways=["compile", STEP])}
    assert costs["compile"].host is None
    host = costs[STEP].host
    assert host is not None and min(host.before_us, host.launch_us, host.behind_us) > 0 and host.between_us == 0
    assert costs[STEP].host_at_work is not None and costs["compile"].host_at_work is None
    assert torch.cuda.CUDAGraph.replay is replay


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who is made and freed; a call takes as many us as its way has letters."""
    order: list[str] = []

    def make(program: step.Program, way: str, with_optimizer: bool) -> step.Made:
        order.append(f"make {way}")
        return step.Made(lambda index: len(way), graphs=1, free=lambda: order.append(f"free {way}"))

    def in_turns(calls: list[Any], wait: Any, samples: int) -> list[Times]:
        order.append("turns")
        parts = HostParts(before_us=1.0, launch_us=2.0, between_us=0.0, behind_us=3.0)
        return [Times([float(call(0))] * samples, parts, None) for call in calls]

    monkeypatch.setattr(step, "_make", make)
    monkeypatch.setattr(step, "times_in_turns", in_turns)
    monkeypatch.setattr(step, "_leave_capture", lambda: None)
    return order


def test_whole_step_ways_are_timed_again_side_by_side(compiled: list[str], turns: list[str]) -> None:
    found = list(step.measure("DCGAN", size="tiny", samples=2, ways=["compile", STEP, BY_HAND]))
    each = [("compile", False), (STEP, False), (BY_HAND, False), (STEP, True), (BY_HAND, True)]
    kept = {(one.way, one.in_turns): one for one in found if not one.with_optimizer}
    assert [(one.way, one.in_turns) for one in found if not one.with_optimizer] == [*each[:3], *each[3:]]
    assert kept[STEP, True].whole_us == [4.0, 4.0] and kept[BY_HAND, True].whole_us == [7.0, 7.0]
    assert kept[STEP, False].whole_us == [1.0, 1.0] and kept[STEP, True].host is not None
    assert kept[STEP, True].reserved_bytes == kept[STEP, False].reserved_bytes == 7, "memory is that of each way alone"
    alone = [f"{what} {way}" for way in ("compile", STEP, BY_HAND) for what in ("make", "free")]
    both = ["make step", "make by hand", "turns", "free step", "free by hand"]
    assert turns == [*alone, *both] * 2
    assert compiled == ["compile"], "nothing is compiled again for that"


def test_ways_that_do_not_fit_side_by_side_keep_their_times(
    compiled: list[str], turns: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_large(*given: Any) -> Any:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(step, "times_in_turns", too_large)
    found = list(step.measure("DCGAN", size="tiny", samples=2, ways=[STEP, BY_HAND]))
    assert [(one.way, one.whole_us, one.in_turns) for one in found[:2]] == [
        (STEP, [1.0, 1.0], False),
        (BY_HAND, [1.0, 1.0], False),
    ]
    assert len(found) == 4
    assert "step, by hand are not timed in turns, OutOfMemoryError: no memory is left" in capsys.readouterr().out
    assert turns.count("make step") == turns.count("free step") == 4


def test_unfreeable_memory_after_an_error_ends_no_other_workload(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def make(program: step.Program, way: str, with_optimizer: bool) -> step.Made:
        made.append(way)
        return step.Made(lambda index: None, graphs=1, free=fails if len(made) > 2 else lambda: None)

    made: list[str] = []
    monkeypatch.setattr(step, "_make", make)
    monkeypatch.setattr(step, "_leave_capture", lambda: None)
    monkeypatch.setattr(step, "times_in_turns", fails)
    found = list(itertools.islice(step.measure("DCGAN", size="tiny", samples=2, ways=[STEP, BY_HAND]), 3))
    assert made[2:4] == [STEP, BY_HAND], "they were made side by side"
    assert [one.whole_us for one in found[:2]] == [[1.0, 1.0]] * 2 and found[2].with_optimizer


def test_a_capture_by_hand_holds_what_its_graph_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of an optimizer that is gone is others' memory, and is written in each launch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    alive = weakref.ref(optimizer)

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    graph = SimpleNamespace(replay=lambda: None, reset=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: contextlib.nullcontext())
    instance = instance_of(lambda: torch.nn.Linear(8, 4), task="training", loss=lambda output: output.square().mean())
    made = step._by_hand(instance, functools.partial(lambda optimizer, inputs: None, optimizer), [], copies=False)
    del optimizer
    gc.collect()
    assert alive() is not None
    made.free()
    del made
    gc.collect()
    assert alive() is None


def test_only_the_ways_that_are_named_are_measured() -> None:
    assert chosen_ways(None) == list(step.WAYS)
    assert chosen_ways([BY_HAND, STEP]) == [STEP, BY_HAND]
    with pytest.raises(WrongUse, match=r"'hand' is no way .* 'callables', 'step', 'by hand', 'by hand, bare'"):
        chosen_ways([STEP, "hand"])


def cost(way: str, whole_us: list[float], refused: str | None = None, *, with_optimizer: bool = False) -> StepCost:
    return StepCost(
        workload="DCGAN",
        with_optimizer=with_optimizer,
        way=way,
        whole_us=whole_us,
        reserved_bytes=2**31 if whole_us else None,
        graphs=1 if whole_us else None,
        refused=refused,
    )


def test_the_table_puts_each_way_beside_the_one_by_hand() -> None:
    host = HostParts(before_us=14.2, launch_us=9.0, between_us=2.0, behind_us=76.4)
    at_work = HostParts(before_us=8.0, launch_us=6.0, between_us=0.0, behind_us=3.0)
    costs = [
        cost("compile", [2000.0, 1000.0, 3000.0]),
        cost(STEP, [600.0]).model_copy(update={"host": host, "host_at_work": at_work}),
        cost(BY_HAND, [500.0]).model_copy(update={"kernels": {"a": 1200, "b": 3}, "kernel_us": 490.4}),
        cost(BARE, [], "out of memory"),
        cost(STEP, [700.0], with_optimizer=True),
    ]
    run = StepRun(micro_schema_version=1, environment=environment(), size="full", costs=costs)
    assert StepRun.model_validate_json(run.model_dump_json()) == run
    text = io.StringIO()
    Console(file=text, width=220).print(table(run))
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in text.getvalue().splitlines() if "DCGAN" in line
    ]
    assert rows[0][:8] == ["DCGAN", "compile", "2,000", "4.00", NONE, NONE, "2.0 GB", "1"]
    assert rows[1][2:6] == ["600", "1.20", "16, 9, 76", "8, 6, 3"]
    assert rows[3][1:4] == [BARE, NONE, NONE]
    assert rows[3][10] == "out of memory"
    assert rows[2][8:10] == ["1,203", "490"]
    assert rows[0][8:10] == [NONE, NONE]
    assert rows[4][0] == "DCGAN with optimizer"
    assert rows[4][3] == NONE  # the one by hand without the optimizer is no measure for it
