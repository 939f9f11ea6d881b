"""Results of a cell are compared with eager's, and their bits between calls and with the mode's first process."""

from __future__ import annotations

import itertools
import threading
import time
import unittest.mock

import pytest
import torch
from tiny_cells import Mlp, cell, replaced_call

import suite.worker.gpu_turns
import suite.worker.judge
from suite.measure.correctness import Agreement
from suite.measure.fingerprint import SKETCH
from suite.measure.results import Results
from suite.results.schema import Status
from suite.worker.gpu_turns import TURNS, GpuTurns
from suite.worker.judge import JudgedResults
from suite.worker.main import failure
from suite.worker.protocol import Inaccurate

__all__ = ["cell"]


def test_mode_that_computes_something_else_is_inaccurate(cell, monkeypatch):
    replaced_call(monkeypatch, lambda module, x: module(x) * 1.01)
    with pytest.raises(Inaccurate, match=r"output differs from eager by a relative error of 0\.01") as raised:
        cell(Mlp).prepare()
    answer = failure(raised.value, "check")
    assert answer.status is Status.FAIL_ACCURACY
    assert answer.correctness is not None and not answer.correctness.passed
    assert answer.correctness.worst == "output"


def test_error_on_the_second_input_alone_is_found(cell, monkeypatch):
    live = cell(Mlp)

    def wrong_on_the_second(module, x):
        return module(x) + (100.0 if torch.equal(x, live._program.checked[1].args[0]) else 0.0)

    replaced_call(monkeypatch, wrong_on_the_second)
    with pytest.raises(Inaccurate):
        live.prepare()


def test_call_that_reads_old_inputs_is_found(cell, monkeypatch):
    class NearlyConstant(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 100)

        def forward(self, x):
            return self.linear(x * 1e-5)

    live = cell(NearlyConstant)
    replaced_call(monkeypatch, lambda module, x: module(live._program.checked[0].args[0]))
    with pytest.raises(Inaccurate, match="output, which is nearer to eager's of other inputs, differs") as raised:
        live.prepare()
    assert raised.value.correctness.max_relative_error < raised.value.correctness.tolerance
    monkeypatch.undo()
    assert cell(NearlyConstant).prepare().correctness.passed


TRIAL = {"mode": "compile", "stochastic": True}


@pytest.mark.parametrize(("correct", "options"), [(2, {"spec": {"warm_up": 1}}), (4, TRIAL)])
def test_error_that_begins_with_a_replay_is_found(cell, monkeypatch, correct, options):
    """A wrongly replayed CUDA graph has correct results in its warm-up and recording: in a trial, of each input."""
    calls = itertools.count()
    replaced_call(monkeypatch, lambda module, x: module(x) if next(calls) < correct else torch.zeros(4, 4))
    live = cell(Mlp, **options)
    with pytest.raises(Inaccurate):
        live.prepare()


def test_known_bits_reuse_the_verdict(cell, monkeypatch):
    """Comparing takes as long as compiling where it needs a program in higher precision."""
    first = cell(Mlp, task="training").prepare().correctness
    refuse = unittest.mock.Mock(side_effect=AssertionError("compared again"))
    monkeypatch.setattr(suite.worker.judge, "compare_with_eager", refuse)
    assert cell(Mlp, task="training").prepare().correctness == first
    replaced_call(monkeypatch, lambda module, x: module(x) * (1 + 1e-6))
    with pytest.raises(AssertionError, match="compared again"):
        cell(Mlp, task="training").prepare()


def test_unwritable_folder_is_no_failure(tmp_path, capsys):
    (tmp_path / "file").touch()
    results = [Results({"output": torch.ones(2)})]
    JudgedResults(tmp_path / "file" / "judged").add(results, Agreement(True, 1, 0.0, "output", None))
    assert "not stored for other processes" in capsys.readouterr().out
    judged = JudgedResults(tmp_path / "judged")
    judged.add(results, Agreement(True, 1, 0.0, "output", None, widened_error=1e-6))
    assert judged.verdict(results) == Agreement(True, 1, 0.0, "output", None, widened_error=1e-6)
    assert judged.verdict(results * 2) is None and judged.verdict([Results({"output": torch.zeros(2)})]) is None


def test_unverified_mode_does_not_excuse_others(cell, monkeypatch):
    replaced_call(monkeypatch, lambda module, x: module(x) * 1.01)
    for _ in range(2):
        with pytest.raises(Inaccurate):
            cell(Mlp).prepare()


def test_cell_waits_on_its_own_clock_while_another_compares(cell, monkeypatch, tmp_path):
    """Comparing may take longer than `MOST_WAIT_S`: XLNET-T is compiled in float64 for it. Eight at once do not fit."""
    others = GpuTurns(tmp_path / TURNS)
    monkeypatch.setattr(suite.worker.gpu_turns, "MOST_WAIT_S", 0.01)
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


@pytest.mark.parametrize(("factor", "passed"), [(1.0, True), (-1.0, False)])
def test_undecided_mode_is_compiled_in_float32(cell, monkeypatch, factor, passed):
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


def test_digests_repeat_for_equal_seeds_only(cell):
    first, again, other = (
        cell(lambda: Mlp(0.5), task="training", stochastic=True, spec={"seed": seed}).prepare().correctness.digests
        for seed in (7, 7, 8)
    )
    assert first == again
    assert first != other


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


def test_varying_tensor_of_a_later_process_counts_by_value(cell, monkeypatch):
    first = cell(Varying).prepare().correctness
    assert first.passed and not first.deterministic
    assert [list(one) for one in first.varying] == [["buffer noise"]] * 2
    spec = {"known_digests": first.digests, "known_varying": first.varying}
    assert cell(Varying, spec=spec).prepare().correctness is None
    for size in (0.0, -1.0, 1.1):
        monkeypatch.setattr(Varying, "size", size)
        assert cell(Varying, spec=spec).prepare().correctness is not None, "compared like the first"


def test_tensor_varying_on_one_input_set_varies_on_all(cell):
    """Two calls may have equal bits accidentally, and a later process would be compared again."""
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


def test_later_process_is_compared_only_with_other_bits(cell, monkeypatch):
    spec = {"known_digests": cell(Mlp).prepare().correctness.digests}
    with monkeypatch.context() as patched:
        patched.setattr(suite.worker.judge, "compare_with_eager", lambda *arguments: pytest.fail("compared"))
        assert cell(Mlp, spec=spec).prepare().correctness is None
    replaced_call(monkeypatch, lambda module, x: module(x) * (1 + 1e-6))
    correctness = cell(Mlp, spec=spec).prepare().correctness
    assert correctness is not None and correctness.passed and correctness.digests != spec["known_digests"]
    replaced_call(monkeypatch, lambda module, x: module(x) * 1.01)
    with pytest.raises(Inaccurate):
        cell(Mlp, spec=spec).prepare()
