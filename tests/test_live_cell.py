"""A cell from build to metrics, in this process, on the CPU."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import threading
import time
import unittest.mock
from dataclasses import replace

import pytest
import torch
from tiny_workloads import WholeCell, workload_of
from torch._dynamo.utils import counters
from torch._inductor.runtime.autotune_cache import AutotuneCache

import suite.gpu_turns
import suite.live_cell
import suite.measured_once
from models import registry
from optimizations import torch_internals
from optimizations.recording.budget import FEWEST_REPLAYS, Use
from suite.cell_errors import Inaccurate, Unsupported
from suite.compile_cache import JUDGED
from suite.gpu_turns import GpuTurns
from suite.measure.correctness import LOSS_SCALES
from suite.measure.fingerprint import SKETCH
from suite.protocol import CellSpec, Measure
from suite.schema import CompileConditions, Status
from suite.worker import failure


@pytest.fixture
def cell(monkeypatch, tmp_path_factory):
    """A function that makes the cell of a module in a mode; its phases are in `.phases`."""
    cache = tmp_path_factory.getbasetemp() / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    cache.mkdir(exist_ok=True)
    shutil.rmtree(cache / JUDGED, ignore_errors=True)
    mark = torch_internals.inductor_config.aot_inductor.metadata
    precision = torch.get_float32_matmul_precision()

    def make(build, mode="eager", *, spec=(), **fields) -> WholeCell:
        registry.workloads()  # or finding this one would add all others, in the monkeypatched registry
        monkeypatch.setitem(registry._REGISTRY, "TINY", workload_of(build, **fields))
        phases: list[str] = []
        options = {
            "workload": "TINY", "variant": "published", "size": "tiny", "mode": mode, "device": "cpu",
            "with_optimizer": False, "seed": 7, "input_sets": 3, "warm_up": 4, "check_inputs": 2, "cpu_threads": 1,
            "cache_dir": str(cache), "warm_cache": True, **dict(spec),
        }  # fmt: skip
        made = WholeCell(CellSpec(**options), phases.append)
        made.phases = phases
        return made

    yield make
    torch.compiler.reset()
    torch_internals.inductor_config.aot_inductor.metadata = mark
    torch.set_float32_matmul_precision(precision)


class Mlp(torch.nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.dropout = torch.nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.trainings = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.second(self.dropout(self.first(x).relu()))


def test_a_cell_of_the_eager_mode(cell):
    live = cell(Mlp)
    prepared = live.prepare()
    assert live.phases == ["build", "check", "compile", "warm-up", "wait", "compare"]
    assert prepared.parameters == 8 * 16 + 16 + 16 * 4 + 4
    assert prepared.input_bytes == 4 * 8 * 4
    correctness = prepared.correctness
    assert correctness.passed and correctness.deterministic and not correctness.fallback_random
    assert (correctness.input_count, correctness.compared_tensors, correctness.compute_dtype) == (2, 2, "float32")
    assert len(set(correctness.digests)) == 2
    assert 0 < prepared.compile.first_call_s <= prepared.compile.warm_up_s

    block = live.measure(Measure(index=1, turn=4, samples=5, throughput_iterations=3))
    assert (block.index, block.turn, block.input_sets) == (1, 4, [2, 0, 1, 2, 0])
    assert len(block.host_us) == 5 and min(block.host_us) > 0 and block.device_us is None
    metrics = live.once.whole()
    assert (metrics.coverage, metrics.graphs, metrics.copies, metrics.memory) == (None, None, None, None)


def test_digests_repeat_with_the_seed_and_only_with_it(cell):
    first, again, other = (
        cell(lambda: Mlp(0.5), task="training", stochastic=True, spec={"seed": seed}).prepare().correctness.digests
        for seed in (7, 7, 8)
    )
    assert first == again
    assert first != other


def replaced_call(monkeypatch, wrong):
    monkeypatch.setattr(suite.live_cell, "callable_for", lambda mode, module: lambda *inputs: wrong(module, *inputs))


def test_a_mode_that_computes_something_else_is_inaccurate(cell, monkeypatch):
    replaced_call(monkeypatch, lambda module, x: module(x) * 1.01)
    with pytest.raises(Inaccurate, match=r"output differs from eager by a relative error of 0\.01") as raised:
        cell(Mlp).prepare()
    answer = failure(raised.value, "check")
    assert answer.status is Status.FAIL_ACCURACY
    assert answer.correctness is not None and not answer.correctness.passed
    assert answer.correctness.worst == "output"


def test_an_error_on_the_second_input_alone_is_found(cell, monkeypatch):
    live = cell(Mlp)

    def wrong_on_the_second(module, x):
        return module(x) + (100.0 if torch.equal(x, live._checked[1].args[0]) else 0.0)

    replaced_call(monkeypatch, wrong_on_the_second)
    with pytest.raises(Inaccurate):
        live.prepare()


def test_a_call_that_reads_old_inputs_is_found_though_all_results_are_nearly_the_same(cell, monkeypatch):
    class NearlyConstant(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 100)

        def forward(self, x):
            return self.linear(x * 1e-5)

    live = cell(NearlyConstant)
    replaced_call(monkeypatch, lambda module, x: module(live._checked[0].args[0]))
    with pytest.raises(Inaccurate, match="output, which is nearer to eager's of other inputs, differs") as raised:
        live.prepare()
    assert raised.value.correctness.max_relative_error < raised.value.correctness.tolerance
    monkeypatch.undo()
    assert cell(NearlyConstant).prepare().correctness.passed


def test_an_error_that_begins_with_the_third_call_is_found(cell, monkeypatch):
    """As when a CUDA graph is replayed wrongly: neither its warm-up nor its recording shows it."""
    calls = 0

    def wrong_from_the_third_call(module, x):
        nonlocal calls
        calls += 1
        return module(x) if calls < 3 else torch.zeros(4, 4)

    replaced_call(monkeypatch, wrong_from_the_third_call)
    with pytest.raises(Inaccurate):
        cell(Mlp, spec={"warm_up": 1}).prepare()


def test_results_that_change_from_call_to_call_are_not_deterministic(cell, monkeypatch):
    calls = 0

    def drifting(module, x):
        nonlocal calls
        calls += 1
        return module(x) * (1 + 1e-6 * calls)

    replaced_call(monkeypatch, drifting)
    correctness = cell(Mlp).prepare().correctness
    assert correctness.passed and not correctness.deterministic


def test_the_optimizer_moves_the_weights_after_the_check_only(cell):
    live = cell(Mlp, task="training", optimizer="sgd", spec={"with_optimizer": True})
    correctness = live.prepare().correctness
    assert correctness.passed and correctness.max_relative_error == 0.0
    weight = live._instance.module.first.weight
    before = weight.detach().clone()
    live.measure(Measure(index=0, turn=0, samples=1, throughput_iterations=0))
    assert not torch.equal(weight, before)


def test_without_the_optimizer_the_weights_stay(cell):
    live = cell(Mlp, task="training", optimizer="sgd")
    live.prepare()
    weight = live._instance.module.first.weight
    before = weight.detach().clone()
    live.measure(Measure(index=0, turn=0, samples=1, throughput_iterations=0))
    assert torch.equal(weight, before)


def test_stochastic_training_compiled_agrees_with_eager_by_its_random_numbers(cell):
    """Half of the hidden values are dropped: with other random numbers, nothing would agree."""
    live = cell(lambda: Mlp(0.5), "compile", task="training", stochastic=True)
    prepared = live.prepare()
    correctness = prepared.correctness
    assert correctness.passed and correctness.fallback_random and correctness.deterministic
    assert correctness.compared_tensors == 7  # output, loss, four gradients, the buffer
    assert prepared.compile.parts["entire_frame_compile"] > 0
    graphs = live.once.whole().graphs
    assert graphs is not None
    assert (graphs.fx_graphs, graphs.graph_breaks, graphs.partitions, graphs.cuda_graphs) == (1, 0, None, 0)


def test_a_mode_with_cuda_graphs_on_a_cpu_says_that_it_has_none(cell):
    live = cell(Mlp, "graph")
    assert live.prepare().correctness.passed
    graphs = live.once.whole().graphs
    assert graphs is not None
    assert (graphs.partitions, graphs.cuda_graphs) == (0, 0)
    assert any("CUDA" in each.reason for each in graphs.not_captured)


def test_input_sets_that_share_memory_are_refused(cell):
    shared = torch.ones(4, 8)
    live = cell(Mlp, inputs=lambda variant, size, generator: registry.Inputs(args=(shared,)))
    with pytest.raises(ValueError, match="same address"):
        live.prepare()


def test_without_a_gpu_a_gpu_cell_is_unsupported(cell, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="no NVIDIA GPU") as raised:
        cell(Mlp, spec={"device": "cuda"}).prepare()
    assert failure(raised.value, "build").status is Status.UNSUPPORTED


def test_a_gpu_too_old_is_unsupported(cell, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla P40")
    with pytest.raises(Unsupported, match=r"Tesla P40 has compute capability 6\.1; torch.compile needs 7\.0"):
        cell(Mlp, spec={"device": "cuda"}).prepare()


def known(digests):
    return {"known_digests": digests}


def test_how_long_an_iteration_takes_is_asked_of_the_first_process(cell, monkeypatch):
    assert 0 < cell(Mlp).prepare().iteration_us != 77.0
    monkeypatch.setattr(suite.live_cell, "iteration_us", None)
    assert cell(Mlp, spec={"known_iteration_us": 77.0}).prepare().iteration_us == 77.0


def test_a_later_process_with_the_known_bits_is_not_compared_again(cell, monkeypatch):
    digests = cell(Mlp).prepare().correctness.digests
    compared = []
    monkeypatch.setattr(suite.live_cell, "compare_with_eager", lambda *arguments: compared.append(arguments))
    prepared = cell(Mlp, spec=known(digests)).prepare()
    assert prepared.correctness is None
    assert compared == []


@pytest.mark.parametrize(
    ("mode", "known", "started"), [("eager", True, False), ("graph", None, False), ("graph", True, True)]
)
def test_what_waits_imports_its_model_and_starts_the_compilers_once_it_is_known_what_they_can_do(
    cell, monkeypatch, mode, known, started
):
    built, toolchains = [], []
    spec = cell(lambda: built.append("tiny") or Mlp(), mode, spec={"size": "full", "vec_isa_ok": known})._spec
    monkeypatch.setattr(suite.live_cell, "start_toolchain", lambda device, *rest: toolchains.append(device.type))
    suite.live_cell.start(spec.model_copy(update={"device": "cuda"}))
    assert built == ["tiny"]
    assert toolchains == ["cpu"] * started, "the GPU is not touched"


def test_what_is_asked_finds_out_what_the_compilers_can_do(cell, monkeypatch):
    asked = []
    monkeypatch.setattr(suite.live_cell, "start_toolchain", lambda *given: asked.append(given) or True)
    spec = cell(Mlp, "compile", spec={"vec_isa_ok": None})._spec
    assert suite.live_cell.start(spec).vec_isa_ok is None and not asked
    assert suite.live_cell.start(spec, asked=True).vec_isa_ok is True
    assert asked == [(torch.device("cpu"), None, spec.headers_dir)]


def test_what_waits_says_nothing_of_a_model_that_cannot_be_built(cell):
    """It will fail where its row says so."""
    suite.live_cell.start(cell(lambda: 1 / 0)._spec)


def test_work_on_graphs_is_not_spread_over_their_use(cell, monkeypatch):
    """A user's graphs are in use for ten times as long first. What the work took is in the row."""
    use = Use()
    use.plan(1e9)
    due = []

    def settled():
        use.called(float(len(due)))
        due.append(use.due)
        return len(due) > FEWEST_REPLAYS

    monkeypatch.setattr(suite.live_cell.optimizations, "settled", settled)
    cell(Mlp, "encore").prepare()
    assert any(due)


def test_another_mode_with_the_same_bits_gets_the_verdict_without_a_comparison(cell, monkeypatch):
    """Comparing takes as long as compiling where it needs a program in higher precision."""
    first = cell(Mlp, task="training").prepare().correctness
    refuse = unittest.mock.Mock(side_effect=AssertionError("compared again"))
    monkeypatch.setattr(suite.live_cell, "compare_with_eager", refuse)
    assert cell(Mlp, task="training").prepare().correctness == first
    replaced_call(monkeypatch, lambda module, x: module(x) * (1 + 1e-6))
    assert cell(Mlp, task="training").prepare().correctness.passed, "each tensor is within the tolerance"
    replaced_call(monkeypatch, lambda module, x: module(x) * 1.01)
    with pytest.raises(AssertionError, match="compared again"):
        cell(Mlp, task="training").prepare()


def test_results_of_other_inputs_are_not_as_right_as_those_that_were_compared(cell, monkeypatch):
    """However near to one another the results of all inputs are."""

    class Nearly(torch.nn.Module):
        def forward(self, x):
            return torch.cat([x] * 4) * 1e-6 + 1.0

    cell(Nearly).prepare()
    kept = []

    def old_inputs(module, x):
        kept.append(module(x))
        return kept[-2] if len(kept) > 1 else kept[-1]

    replaced_call(monkeypatch, old_inputs)
    with pytest.raises(Inaccurate):
        cell(Nearly).prepare()


def test_what_was_not_found_right_is_no_excuse_for_others(cell, monkeypatch):
    replaced_call(monkeypatch, lambda module, x: module(x) * 1.01)
    for _ in range(2):
        with pytest.raises(Inaccurate):
            cell(Mlp).prepare()


class Varying(Mlp):
    """Its output is the same in each call, but for what the seed decides, and a buffer is not."""

    size = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.noise += (1 + 1e-6 * next(self.counted)) * self.size * torch.linspace(1, 2, 64)
        return super().forward(x)

    counted = itertools.count()


def test_of_a_later_process_a_tensor_that_varies_is_looked_at_by_its_values(cell, monkeypatch):
    first = cell(Varying).prepare().correctness
    assert first.passed and not first.deterministic
    assert [list(one) for one in first.varying] == [["buffer noise"]] * 2
    spec = {"known_digests": first.digests, "known_varying": first.varying}
    assert cell(Varying, spec=spec).prepare().correctness is None
    for size in (0.0, -1.0, 1.1):
        monkeypatch.setattr(Varying, "size", size)
        assert cell(Varying, spec=spec).prepare().correctness is not None, "compared like the first"


def test_a_tensor_that_varies_on_one_input_set_counts_as_varying_on_all(cell):
    """By chance two calls may have the same bits, and a later process would be compared again for it."""
    first_set: list[torch.Tensor] = []

    class VaryingOnOthers(Varying):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first_set.append(x.clone())
            self.noise += 1 if torch.equal(x, first_set[0]) else 1 + 1e-6 * next(self.counted)
            return Mlp.forward(self, x)

    first = cell(VaryingOnOthers).prepare().correctness
    assert first.passed and not first.deterministic
    assert [list(one) for one in first.varying] == [["buffer noise"]] * 2
    assert all(len(one["buffer noise"]) == SKETCH for one in first.varying)


def test_of_a_later_process_other_bits_count_where_there_were_none_that_vary(cell, monkeypatch):
    first = cell(Varying).prepare().correctness
    spec = {"known_digests": first.digests, "known_varying": first.varying}
    replaced_call(monkeypatch, lambda module, x: module(x) * (1 + 1e-6))
    assert cell(Varying, spec=spec).prepare().correctness is not None


def test_a_later_process_with_other_bits_is_compared_like_the_first(cell, monkeypatch):
    digests = cell(Mlp).prepare().correctness.digests
    replaced_call(monkeypatch, lambda module, x: module(x) * (1 + 1e-6))
    correctness = cell(Mlp, spec=known(digests)).prepare().correctness
    assert correctness is not None and correctness.passed and correctness.digests != digests
    replaced_call(monkeypatch, lambda module, x: module(x) * 1.01)
    with pytest.raises(Inaccurate):
        cell(Mlp, spec=known(digests)).prepare()


def test_a_later_process_of_a_stochastic_mode_with_other_bits_runs_the_trial_too(cell):
    live = cell(lambda: Mlp(0.5), "compile", task="training", stochastic=True, spec=known(["other"]))
    correctness = live.prepare().correctness
    assert correctness is not None and correctness.passed and correctness.fallback_random
    assert live.measure(Measure(index=0, turn=0, samples=2, throughput_iterations=0)).host_us, "compiled again after it"


def test_trials_share_caches_that_are_not_those_of_what_is_measured(cell, monkeypatch, tmp_path):
    """Each process of a mode whose results are never twice the same runs one, and only the first compiles for it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    found = []
    for _ in range(2):
        torch.compiler.reset()
        counters.clear()
        live = cell(lambda: Mlp(0.5), "compile", task="training", stochastic=True, spec={"cache_dir": str(tmp_path)})
        live.build()
        found.append(counters["inductor"]["fxgraph_cache_hit"] > 0)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert found == [False, True]
    counters.clear()
    live.compile(CompileConditions.COLD_ALONE)
    assert counters["inductor"]["fxgraph_cache_hit"] == 0 < counters["inductor"]["fxgraph_cache_miss"]


def test_the_trial_of_a_later_process_finds_what_the_first_compiled_for_its_own(cell, monkeypatch, tmp_path):
    """A later process has marked its graphs with the name of its mode before it knows that it needs a trial."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    spec = {"cache_dir": str(tmp_path)}
    cell(lambda: Mlp(0.5), "compile", task="training", stochastic=True, spec=spec).build()
    spec |= {"known_digests": ["other", "bits"]}
    live = cell(lambda: Mlp(0.5), "compile", task="training", stochastic=True, spec=spec)
    live.build()
    live.compile(CompileConditions.WARM)
    mark = torch_internals.inductor_config.aot_inductor.metadata
    counters.clear()
    live._run_reference()
    assert counters["inductor"]["fxgraph_cache_hit"] > 0 == counters["inductor"]["fxgraph_cache_miss"]
    assert torch_internals.inductor_config.aot_inductor.metadata == mark, "what is compiled next is the mode's again"


def test_warm_up_goes_on_until_every_input_set_was_replayed(cell, monkeypatch):
    """However few iterations are asked for: two calls come before the first replay."""
    calls = []

    def counted(module, x):
        calls.append(x)
        return module(x)

    replaced_call(monkeypatch, counted)
    live = cell(Mlp, spec={"warm_up": 1, "input_sets": 3})
    live.build()
    live._compile_and_warm_up(CompileConditions.COLD_ALONE)
    assert len(calls) == suite.live_cell.CALLS_TO_REPLAY - 1 + 3
    assert {id(x) for x in calls[2:]} == {id(inputs.args[0]) for inputs in live._input_sets}


def test_a_cell_is_called_until_encores_graphs_have_settled(cell, monkeypatch):
    calls, answers = [], iter([False, False, False])
    replaced_call(monkeypatch, lambda module, x: calls.append(x) or module(x))
    monkeypatch.setattr(suite.live_cell.optimizations, "settled", lambda: next(answers, True))
    live = cell(Mlp, spec={"warm_up": 11})
    live.build()
    times = live._settle(live._compile_and_warm_up(CompileConditions.COLD_ALONE))
    assert (len(calls), times.settle_calls, times.settled) == (11 + 3, 3, True)


def test_a_cell_that_waits_for_its_turn_has_its_time_to_settle_nevertheless(cell, monkeypatch):
    """Another one may judge its results for longer than that, alone on the GPU."""
    answers = iter([False] * 3)
    monkeypatch.setattr(suite.live_cell.optimizations, "settled", lambda: next(answers, True))
    monkeypatch.setattr(suite.live_cell, "SETTLE_S", 0.05)
    live = cell(Mlp, "encore", spec={"warm_up": 11})
    live._build()
    times = live._compile_and_warm_up(CompileConditions.COLD_ALONE)
    monkeypatch.setattr(live, "_calling", lambda: contextlib.nullcontext(time.sleep(0.06)))
    assert live._settle(times).settled


def test_a_graph_that_never_settles_is_measured_all_the_same_and_the_row_says_so(cell, monkeypatch):
    monkeypatch.setattr(suite.live_cell.optimizations, "settled", lambda: False)
    monkeypatch.setattr(suite.live_cell, "SETTLE_S", 0.05)
    live = cell(Mlp)
    live.build()
    times = live._settle(live._compile_and_warm_up(CompileConditions.COLD_ALONE))
    assert times.settle_calls > 0
    assert times.settled is False


def test_warm_up_takes_the_iterations_asked_for(cell, monkeypatch):
    calls = []
    replaced_call(monkeypatch, lambda module, x: calls.append(x) or module(x))
    live = cell(Mlp, spec={"warm_up": 11})
    live.build()
    live._compile_and_warm_up(CompileConditions.COLD_ALONE)
    assert len(calls) == 11


def test_all_processes_of_a_workload_give_back_what_only_checks_need(cell, monkeypatch, tmp_path):
    """Eight that keep what eager's comparison took do not fit where eight that are measured do."""
    turns = GpuTurns(tmp_path / suite.live_cell.TURNS)
    events = []

    def judged(*arguments, **named):
        monkeypatch.setattr(suite.gpu_turns, "MOST_WAIT_S", 0.01)
        with turns.calling():
            events.append("judged")
        return compare(*arguments, **named)

    compare = suite.live_cell.compare_with_eager
    monkeypatch.setattr(suite.live_cell, "release", lambda device: events.append("release"))
    monkeypatch.setattr(suite.live_cell, "compare_with_eager", judged)
    replaced_call(monkeypatch, lambda module, x: (events.append("call"), module(x))[1])
    live = cell(lambda: Mlp(0.5), "encore", task="training", stochastic=True, spec={"cache_dir": str(tmp_path)})
    live.build()
    assert events[0] == "release", "eager's, before the trial"
    judging = events.index("judged")
    assert events[judging - 1] == "release", "the trial's, before others wait for this one"
    assert events[judging:] == ["judged", "judged", "release"], "the judge's"


def test_a_cell_judges_while_it_has_the_gpu_for_itself_and_warms_up_while_nobody_has(cell, monkeypatch, tmp_path):
    others = GpuTurns(tmp_path / suite.live_cell.TURNS)
    monkeypatch.setattr(suite.gpu_turns, "MOST_WAIT_S", 0.01)
    seen = []

    def free():
        """Whether another process could call now, and whether it could have the GPU for itself."""
        found = []
        for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):
            others._take(kind)
            found.append(others._held == kind)
            others._take(fcntl.LOCK_UN)
        return tuple(found)

    compare = suite.live_cell.compare_with_eager
    monkeypatch.setattr(
        suite.live_cell,
        "compare_with_eager",
        lambda *rest, **named: (seen.append(("judge", free())), compare(*rest, **named))[1],
    )
    replaced_call(monkeypatch, lambda module, x: (seen.append(("call", free())), module(x))[1])
    live = cell(Mlp, spec={"cache_dir": str(tmp_path), "warm_up": 3, "input_sets": 2})
    live.build()
    live.compile(CompileConditions.COLD_ALONE)
    warm_up = [("call", (True, True))] + [("call", (True, False))] * 3
    assert seen == warm_up, "compiling is no load on the GPU"
    live.settle()
    assert ("judge", (False, False)) in seen
    assert free() == (True, True)


def test_a_cell_waits_with_a_clock_of_its_own_while_another_compares(cell, monkeypatch, tmp_path):
    """Comparing may take longer than `MOST_WAIT_S`: XLNET-T is compiled in float64 for it. Eight at once do not fit."""
    others = GpuTurns(tmp_path / suite.live_cell.TURNS)
    monkeypatch.setattr(suite.gpu_turns, "MOST_WAIT_S", 0.01)
    live = cell(lambda: Mlp(0.5), "compile", task="training", stochastic=True, spec={"cache_dir": str(tmp_path)})
    took = threading.Event()

    def compare_in_another():
        with others.alone():
            took.set()
            while "wait" not in live.phases:
                time.sleep(0.01)
            time.sleep(0.3)
            seen.extend(live.phases)

    seen: list[str] = []
    other = threading.Thread(target=compare_in_another)
    other.start()
    took.wait()
    live.build()
    other.join()
    assert seen == ["build", "check", "wait"]
    assert live.phases == ["build", "check", "wait", "compare"]


def test_a_rank_that_tunes_does_not_wait_for_one_that_waits_to_tune(monkeypatch, tmp_path):
    """Two modes of two ranks. Each rank has a GPU with turns of its own; a collective needs both ranks of a mode."""
    monkeypatch.setattr(suite.gpu_turns, "MOST_WAIT_S", 10.0)
    pending = threading.local()

    def synchronize() -> None:
        if hasattr(pending, "work"):
            pending.work.wait()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    class Collective:
        def __init__(self) -> None:
            self._launched, self._whole, self._lock = 0, threading.Event(), threading.Lock()

        def launch(self) -> None:
            pending.work = self._whole
            with self._lock:
                self._launched += 1
                if self._launched == 2:
                    self._whole.set()

    def rank(number: int, collective: Collective, is_behind: bool) -> None:
        """One that is behind tunes a kernel more, in front of the collective, where the other has found it tuned."""
        turns = GpuTurns(tmp_path / f"turns-{number}")

        def tune() -> None:
            with suite.live_cell.alone_to_tune(turns, "cuda"):
                time.sleep(0.05)
                torch.cuda.synchronize()  # as who times a kernel does

        if is_behind:
            time.sleep(0.3)
            tune()
        collective.launch()
        tune()

    first, second = Collective(), Collective()
    ranks = [
        threading.Thread(target=rank, args=arguments, daemon=True)
        for arguments in [(0, first, False), (1, first, True), (0, second, True), (1, second, False)]
    ]
    begin = time.monotonic()
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(20.0)
    assert time.monotonic() - begin < 5.0


class HalfGradients(Mlp):
    """Its gradients pass through float16, as under autocast on a GPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).half().float()


class Doubled(torch.autograd.Function):
    """Twice the gradient of what it is given."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@pytest.mark.parametrize(("size", "scale"), [(1e-6, 2.0**15), (1e3, 2.0**7), (1e6, 1.0)])
def test_a_trial_finds_wrong_gradients_that_are_too_small_for_float16(cell, monkeypatch, size, scale):
    """And its losses are not scaled so far that eager's gradients are infinite."""
    monkeypatch.setattr(suite.live_cell, "loss_scales", lambda instance: LOSS_SCALES)
    options = {"task": "training", "stochastic": True, "loss": lambda output: output.mean() * size}
    seen = []
    replaced_call(monkeypatch, lambda module, x: seen.append(live._instance.loss_scale) or module(x))
    live = cell(lambda: HalfGradients(0.5), "compile", **options)
    live.build()
    assert set(seen) == {scale} and len(seen) == 2 * 3, "calls of the trial"
    seen.clear()
    live.compile(CompileConditions.COLD_ALONE)
    assert live.settle().correctness.passed
    assert set(seen) == {1.0}, "what is measured is the program as it is"
    replaced_call(monkeypatch, lambda module, x: Doubled.apply(module(x)))
    with pytest.raises(Inaccurate, match="gradient"):
        cell(lambda: HalfGradients(0.5), "compile", **options).build()


def test_without_scaled_losses_it_would_not_be_found(cell, monkeypatch):
    monkeypatch.setattr(suite.live_cell, "loss_scales", lambda instance: (1.0,))
    replaced_call(monkeypatch, lambda module, x: Doubled.apply(module(x)))
    options = {"task": "training", "stochastic": True, "loss": lambda output: output.mean() * 1e-9}
    cell(lambda: HalfGradients(0.5), "compile", **options).build()


def test_nothing_of_the_trial_is_left_to_wait_for_calls(cell, monkeypatch):
    """A graph that is not called any more never settles, and each cell waited 20 s for it."""
    forgotten = []
    monkeypatch.setattr(suite.live_cell.optimizations, "reset", lambda: forgotten.append(len(calls)))
    calls = []
    replaced_call(monkeypatch, lambda module, x: calls.append(x) or module(x))
    live = cell(lambda: Mlp(0.5), "encore", task="training", stochastic=True)
    live.build()
    assert forgotten == [len(calls)], "after the trial's last call"
    assert calls


def test_the_trial_of_a_stochastic_workload_judges_replays_and_not_the_first_calls(cell, monkeypatch):
    """As when a CUDA graph is replayed wrongly: the first call is warm-up, the second the recording."""
    calls = 0

    def wrong_from_the_third_call(module, x):
        nonlocal calls
        calls += 1
        return module(x) if calls <= 2 * 2 else torch.zeros(4, 4)  # two inputs are checked

    replaced_call(monkeypatch, wrong_from_the_third_call)
    live = cell(lambda: Mlp(0.5), "compile", stochastic=True)
    with pytest.raises(Inaccurate):
        live.build()


def test_peaks_count_from_their_restart(monkeypatch):
    """Compiling needs far more than replaying; without a restart the larger peak would stand for both."""
    from suite.measure import memory

    allocator = {"now": 100, "peak": 100}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device=None: allocator.update(peak=allocator["now"])
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: allocator["peak"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device=None: 2 * allocator["peak"])
    device = torch.device("cuda")
    allocator["peak"] = 5000
    memory.restart_peak(device)
    allocator["peak"] = 300
    assert memory.peak(device) == memory.Peak(300, 600)
    allocator["peak"] = 5000
    memory.restart_peak(device)
    assert memory.peak(device) == memory.Peak(100, 200)


@pytest.mark.parametrize(("second", "found"), [("indirection", 1), ("lean", 0)])
def test_compiled_graphs_are_found_by_their_own_mode_only(cell, monkeypatch, tmp_path, second, found):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for mode in ("indirection", second):
        torch.compiler.reset()
        counters.clear()
        live = cell(lambda: torch.nn.Linear(8, 8), mode)
        live.build()
        live.compile(CompileConditions.COLD_ALONE)
    assert counters["inductor"]["fxgraph_cache_hit"] == found


def test_what_tuning_finds_is_stored_and_looked_up_under_one_key(cell):
    """Compile workers do not know what a process has marked its graphs with, and it is they who name what is stored."""
    key = AutotuneCache._prepare_key("kernel.py")
    live = cell(lambda: torch.nn.Linear(8, 8), "compile")
    live.build()
    live.compile(CompileConditions.COLD_ALONE)
    assert AutotuneCache._prepare_key("kernel.py") == key


def test_a_cell_restarts_peaks_before_compiling_before_timing_and_before_replaying(cell, monkeypatch):
    events = []
    for module in (suite.live_cell, suite.measured_once):
        monkeypatch.setattr(module, "restart_peak", lambda device: events.append("restart"))
        monkeypatch.setattr(module, "peak", lambda device: events.append("peak"))
    replaced_call(monkeypatch, lambda module, x: (events.append("call"), module(x))[1])
    live = cell(Mlp)
    live.build()
    events.clear()
    live.compile(CompileConditions.COLD_ALONE)
    live.settle()
    live.once.whole()
    without_calls = [event for event in events if event != "call"]
    assert without_calls == ["restart", "peak", "restart", "restart", "peak"]
    first, second = (index for index, event in enumerate(events) if event == "peak")
    assert events[0] == "restart" and events[1:first].count("call") >= 4
    assert events[second - 4 : second] == ["restart", "call", "call", "call"], "each input set once"


@pytest.mark.parametrize(("factor", "passed"), [(1.0, True), (-1.0, False)])
def test_a_mode_that_its_own_dtype_does_not_decide_is_compiled_in_float32(cell, monkeypatch, factor, passed):
    class Cancelling(torch.nn.Module):
        def forward(self, x):
            return ((x + 4096.0) - 4096.0) * 1.5 + x * 1e-3

    dtypes = []

    def nearly(module, x):
        dtypes.append(x.dtype)
        return module(x) * (1.2 if x.dtype is torch.bfloat16 else factor)

    replaced_call(monkeypatch, nearly)
    live = cell(Cancelling, dtype_policy="bf16")
    if passed:
        correctness = live.prepare().correctness
        assert correctness is not None and correctness.passed and correctness.widened_error == 0.0
        assert dtypes[-1] is torch.bfloat16, "compiled again after it"
    else:
        with pytest.raises(Inaccurate):
            live.prepare()
    assert torch.float32 in dtypes


def test_copies_into_placeholders_come_from_the_count_and_the_rest_from_the_profile(cell, monkeypatch):
    """With a profile and a count as a GPU would give them: each stands in its own field."""
    from suite.measure.copies import CopyCount
    from suite.measure.coverage import IterationProfile
    from suite.schema import Coverage

    @contextlib.contextmanager
    def counting():
        yield CopyCount(copied_bytes=4096, tensors=3, pointer_bytes=16)

    coverage = Coverage(
        graph_kernels=5, eager_kernels=1, percent=83.3, graph_launches=1, graph_memcpys=0, graph_memsets=0,
        eager_memcpys=0, eager_memsets=0, captured_kernel_nodes=None, profiled_iterations=3,
    )  # fmt: skip
    profile = IterationProfile(coverage, {"k 1 32": 6}, 12.5, [], 777)
    live = cell(Mlp, "graph")
    live.build()
    live._iterate = live._iteration(live._instance.module)
    loaded = []
    monkeypatch.setattr(suite.measured_once.copies, "counting", counting)
    monkeypatch.setattr(suite.measured_once, "load_profiler", loaded.append)
    monkeypatch.setattr(suite.measured_once, "profile_iterations", lambda iterate, agreed, sources: profile)
    monkeypatch.setattr(suite.measured_once, "recorded_graphs", lambda device: [])
    monkeypatch.setattr(suite.measured_once.MeasuredOnce, "_replay_memory", lambda once: None)
    live._instance = replace(live._instance, device=torch.device("cuda"))
    metrics = live.once.whole()
    assert metrics.copies is not None
    counted = (metrics.copies.placeholder_bytes, metrics.copies.placeholder_tensors, metrics.copies.pointer_bytes)
    assert counted == (4096, 3, 16)
    assert (metrics.copies.device_to_device_bytes, metrics.kernel_time_us) == (777, 12.5)
    assert metrics.kernels == {"k 1 32": 6}
    assert len(loaded) == 1, "steps that were not asked for before are taken"


def test_a_cell_that_was_measured_without_a_profiler_is_not_measured_again_with_it(cell, monkeypatch):
    live = cell(Mlp)
    live.prepare()
    order = []
    monkeypatch.setattr(suite.measured_once, "restart_peak", lambda device: order.append("memory"))
    monkeypatch.setattr(suite.measured_once.MeasuredOnce, "_on_gpu", True)
    monkeypatch.setattr(suite.measured_once, "load_profiler", lambda iterate: order.append("load"))
    monkeypatch.setattr(suite.measured_once, "profile_iterations", lambda *given: order.append("profile"))
    live.once.without_profiler()
    live.once.load_profiler()
    assert order == ["memory", "load"]
    live.once.whole()
    assert order == ["memory", "load", "profile"]
