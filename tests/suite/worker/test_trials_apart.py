"""Trials of stochastic workloads in other processes than those that are measured, while these compile."""

from __future__ import annotations

import gc
import shutil
import threading
import time
import weakref
from pathlib import Path

import pytest
from fixtures.bench import Bench, bench, told
from fixtures.fake_runs import SETTINGS, events, fake_workers_alive, fake_workload
from tiny_cells import Mlp, cell

import suite.worker.compilation
import suite.worker.judge
from suite.measure.modes import MODES
from suite.results.schema import CompileConditions, Correctness, Status
from suite.worker.cell_program import CellProgram
from suite.worker.compile_cache import JUDGED
from suite.worker.gpu_turns import TURNS, GpuTurns
from suite.worker.protocol import Inaccurate, Prepare, Settle, Try
from suite.worker.start import try_apart

__all__ = ["bench", "cell"]

SIX = tuple(MODES[name] for name in ("eager", "compile", "graph", "graph-unpartitioned", "lean", "encore"))
STOCHASTIC = (fake_workload(stochastic=True),)
TWO = SETTINGS.model_copy(update={"processes": 2})


def test_three_modes_are_tried_while_all_compile(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    said = told(monkeypatch)
    bench.run(workloads=STOCHASTIC, modes=SIX, settings=TWO)
    assert {cell.status for cell in bench.cells().values()} == {Status.PASS}
    (prepares,) = (
        [*each.values()] for each in said if ("compile", 0) in each and isinstance(each["compile", 0], Prepare)
    )
    first = [one for one in prepares if isinstance(one, Prepare)]
    assert {one.spec.tried_elsewhere for one in first} == {2}, "two processes more with tensors on the GPU"
    (together,) = (each for each in said if any(isinstance(one, Try) for one in each.values()))
    tries = {place: one.spec for place, one in together.items() if isinstance(one, Try)}
    assert {place: (spec.mode, spec.follows) for place, spec in tries.items()} == {
        ("eager", 0): ("compile", True), ("graph", 1): ("graph", True), ("encore", 1): ("encore", True),
    }  # fmt: skip
    assert {name for (name, process), one in together.items() if process == 0 and not isinstance(one, Try)} == {
        mode.name for mode in SIX[1:]
    }, "all that compile, at the same time"
    settles = [(place, one) for each in said for place, one in each.items() if isinstance(one, Settle) and not place[1]]
    assert [name for (name, _), _ in settles[:3]] == ["compile", "graph", "encore"]
    by_name = {name: one for (name, _), one in settles}
    assert {name: one.tried.worst if one.tried else None for name, one in by_name.items()} == {
        "compile": "trial-of-compile", "graph": "trial-of-graph", "encore": "trial-of-encore",
        "eager": None, "graph-unpartitioned": None, "lean": None,
    }  # fmt: skip
    assert {name: len(one.alike) for name, one in by_name.items()} == {
        "compile": 0, "graph": 0, "encore": 0, "eager": 0, "graph-unpartitioned": 3, "lean": 3,
    }  # fmt: skip
    assert fake_workers_alive() == []


@pytest.mark.parametrize(
    ("workload", "modes", "behave", "tried"),
    [
        (fake_workload(), SIX, {}, []),
        (STOCHASTIC[0], SIX, {"*": "crowded"}, []),
        (STOCHASTIC[0], (*SIX, MODES["step"]), {}, []),
        (STOCHASTIC[0], SIX[1:], {}, []),
        (STOCHASTIC[0], (SIX[0], *SIX[2:]), {}, []),
        (STOCHASTIC[0], SIX[:2], {}, ["compile"]),
        (STOCHASTIC[0], SIX[3:4], {}, []),
    ],
)
def test_who_is_tried_apart(bench: Bench, workload, modes, behave, tried) -> None:
    bench.run(behave, workloads=(workload,), modes=modes, settings=TWO)
    assert sorted(words[1] for words in events(bench.folder) if words[0] == "tried") == tried
    assert {cell.status for cell in bench.cells().values()} == {Status.PASS}


@pytest.mark.parametrize("what", ["untried@try", "exit:1@try"])
def test_what_cannot_be_tried_apart_is_tried_by_its_own_process(bench: Bench, what: str) -> None:
    bench.run({"graph": what}, workloads=STOCHASTIC, modes=SIX, settings=TWO)
    settled = {words[1]: words[2] for words in reversed(events(bench.folder)) if words[0] == "settled"}
    assert (settled["graph"], settled["compile"]) == ("-", "trial-of-compile")
    assert {(cell.status, cell.processes) for cell in bench.cells().values()} == {(Status.PASS, 2)}
    assert fake_workers_alive() == []


@pytest.mark.parametrize("where", ["try", "prepare", "compile"])
def test_an_eager_process_that_fails_fails_its_mode_and_no_other(bench: Bench, where: str) -> None:
    bench.run({"eager": f"exit:1@{where}"}, workloads=STOCHASTIC, modes=SIX, settings=TWO)
    status = {name: cell.status for name, cell in bench.cells().items()}
    assert status.pop("eager") is Status.CRASH
    assert set(status.values()) == {Status.PASS} and len(status) == 5
    assert {cell.processes for name, cell in bench.cells().items() if name != "eager"} == {2}
    assert fake_workers_alive() == []


def test_modes_short_of_memory_are_prepared_without_trials_apart(bench: Bench) -> None:
    bench.run({"graph": "fail:oom@compile"}, workloads=STOCHASTIC, modes=SIX, settings=TWO)
    said = [words[:2] for words in events(bench.folder)]
    assert [words for words in said if words[0] == "tried"].count(["tried", "compile"]) == 1
    assert {words[1] for words in said if words[0] == "tried"} == {"compile", "graph", "encore"}
    assert said.count(["compiled", "compile"]) > 2, "with trials, without, and in smaller groups"
    assert {name for name, cell in bench.cells().items() if cell.status is not Status.PASS} == {"graph"}
    assert fake_workers_alive() == []


def test_times_of_a_compilation_are_without_the_turns_of_trials(fresh, monkeypatch, tmp_path: Path) -> None:
    others = GpuTurns(tmp_path / TURNS)
    live = fresh(tried_elsewhere=0)
    live.build()
    took = threading.Event()

    def compare() -> None:
        with others.alone():
            took.set()
            while "warm-up" not in live.phases:
                time.sleep(0.01)
            time.sleep(1.0)

    other = threading.Thread(target=compare)
    other.start()
    took.wait()
    begin = time.perf_counter()
    live.compile(CompileConditions.COLD_ALONE)
    whole = time.perf_counter() - begin
    other.join()
    times = live._compilation._compile_times
    assert 0.9 <= times.waited_s < whole
    assert times.first_call_s <= times.warm_up_s <= whole - times.waited_s + 0.01


def test_a_trial_that_fails_leaves_the_eager_cell_as_it_was(fresh, monkeypatch) -> None:
    eager = fresh("eager")
    eager.build()
    reference, instance = eager._judge.eager, eager._program.instance
    monkeypatch.setattr(suite.worker.judge, "loss_scales", lambda instance: (8.0,))
    monkeypatch.setattr(suite.worker.compilation, "callable_for", lambda mode, module: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        eager.try_out("compile")
    assert (eager._compilation.mode.name, eager._judge.eager, eager._program.instance) == ("eager", reference, instance)
    assert instance.loss_scale == 1.0


def stochastic(cell, mode="compile", **spec):
    return cell(lambda: Mlp(0.5), mode, task="training", stochastic=True, spec=spec)


@pytest.fixture
def fresh(tmp_path: Path, cell):
    """A function that makes the stochastic cell of a mode, all in one folder."""
    return lambda mode="compile", **spec: stochastic(cell, mode, cache_dir=str(tmp_path), **spec)


def test_cell_tried_elsewhere_compiles_once_and_has_the_verdict(fresh, monkeypatch, tmp_path: Path) -> None:
    eager = fresh("eager")
    eager.build()
    reference, instance = eager._judge.eager, eager._program.instance
    tried = eager.try_out("compile")
    assert tried.passed and tried.fallback_random and tried.compared_tensors > 4
    assert (eager._compilation.mode.name, eager._judge.eager, eager._judge.trial_verdict) == ("eager", reference, None)
    assert eager._program.instance is instance
    eager.compile(CompileConditions.COLD_ALONE)
    assert eager.settle().correctness.fallback_random is False

    live = fresh(tried_elsewhere=0)
    monkeypatch.setattr(live._judge, "run_reference", lambda: pytest.fail("it is tried elsewhere"))
    assert live.build().was_tried is False
    live.compile(CompileConditions.COLD_ALONE)
    found = live.settle(tried).correctness
    assert found.passed and found.fallback_random
    assert (found.worst, found.max_relative_error) == (tried.worst, tried.max_relative_error)
    assert len(found.digests) == 2 and found.deterministic

    other = fresh("compile", tried_elsewhere=0)
    monkeypatch.setattr(other._judge, "run_reference", lambda: pytest.fail("it has the bits of one that was tried"))
    other.build()
    other.compile(CompileConditions.COLD_ALONE)
    wrong = found.model_copy(update={"digests": ["other", "bits"], "worst": "none of these"})
    assert other.settle(None, [wrong, found]).correctness == found


def test_whoever_has_the_bits_of_none_tries_itself(fresh, monkeypatch) -> None:
    live = fresh(tried_elsewhere=0)
    live.build()
    live.compile(CompileConditions.COLD_ALONE)
    references = []
    run = live._judge.run_reference
    monkeypatch.setattr(live._judge, "run_reference", lambda: (references.append(1), run()))
    other = wrong_digests()
    found = live.settle(None, [other]).correctness
    assert references == [1] and found.passed and found.fallback_random and found.digests != other.digests


def wrong_digests() -> Correctness:
    return Correctness(
        passed=True, input_count=2, compared_tensors=1, compute_dtype="float32", tolerance=1e-5, max_relative_error=0.0,
        worst="output", reference_error=None, fallback_random=True, deterministic=True, digests=["a", "b"],
        bitwise_with=None, bitwise=None,
    )  # fmt: skip


def test_a_trial_that_was_wrong_fails_the_mode(fresh) -> None:
    live = fresh(tried_elsewhere=0)
    live.build()
    live.compile(CompileConditions.COLD_ALONE)
    wrong = wrong_digests().model_copy(update={"passed": False, "max_relative_error": 3.0, "worst": "gradient w"})
    with pytest.raises(Inaccurate, match="gradient w"):
        live.settle(wrong)


def test_of_a_trial_apart_nothing_is_left(fresh, monkeypatch, tmp_path: Path) -> None:
    """The same process is measured later, and the GPU has memory for one program of each mode."""
    modules = []
    build = CellProgram.build
    monkeypatch.setattr(
        CellProgram, "build", lambda program: (build(program), modules.append(weakref.ref(program.instance.module)))
    )
    found = try_apart(fresh("compile")._spec, lambda phase: None)
    assert found.passed and found.fallback_random
    gc.collect()
    assert [module() for module in modules] == [None]
    shutil.rmtree(tmp_path / JUDGED, ignore_errors=True)
    assert fresh("compile").prepare().correctness.passed
