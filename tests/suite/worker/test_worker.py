"""Workers over real pipes: tiny workloads, every failure, and no process that outlives its runner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fixtures.fake_runs import living, wait_until
from tiny_workloads import spec_of

from suite.results.schema import CompileConditions, Status
from suite.run.process import WORKER_COMMAND, RankedWorker, end
from suite.run.supervise import await_exit
from suite.worker.main import failure, status_of
from suite.worker.protocol import (
    Collect,
    Collected,
    Command,
    Compile,
    Done,
    Failed,
    Measure,
    Measured,
    Prepare,
    Prepared,
    Settle,
    Stop,
)
from tests.suite.run.test_process import ask

PATIENCE_S = 250.0
PYTHON = (sys.executable, "-P", "-c")


@contextmanager
def worker(folder: Path, *command: str) -> Iterator[RankedWorker]:
    one = RankedWorker(command or WORKER_COMMAND, folder / "log", 1, "cpu")
    try:
        yield one
    finally:
        end([one], ask_first=False)


def test_program_that_ends_its_process_is_a_failure_with_reason(tmp_path):
    code = """
        import sys
        from suite.worker import main as worker
        worker.enter_environment = lambda spec: sys.exit("ERROR: no data")
        worker.main()
    """
    with worker(tmp_path, *PYTHON, textwrap.dedent(code)) as one:
        failed = ask(one, Prepare(spec=spec_of("EOS")), PATIENCE_S)
    assert isinstance(failed, Failed)
    assert (failed.status, failed.error) == (Status.MODEL_FAIL_TO_LOAD, "build: SystemExit: ERROR: no data")


@pytest.mark.parametrize(("workload", "mode"), [("EOS", "eager"), ("ALNET", "eager"), ("EOS", "compile")])
def test_real_workload_from_prepare_to_stop(tmp_path, workload, mode):
    phases: list[str] = []
    with worker(tmp_path) as one:

        def get(command: Command, kind: type):
            answer = ask(one, command, PATIENCE_S, lambda _, phase: phases.append(phase))
            assert isinstance(answer, kind), (answer, one.ranks[0].log_tail())
            return answer

        get(Prepare(spec=spec_of(workload, mode, cache_dir=str(tmp_path / "cache"))), Done)
        assert phases == ["build", "check"]
        get(Compile(conditions=CompileConditions.COLD_ALONE), Done)
        prepared = get(Settle(), Prepared)
        assert phases == ["build", "check", "compile", "warm-up", "wait", "compare"]
        assert prepared.correctness.passed and prepared.correctness.deterministic
        assert len(set(prepared.correctness.digests)) == 2
        assert prepared.input_bytes > 0 and prepared.iteration_us > 0
        assert prepared.compile.conditions is CompileConditions.COLD_ALONE
        assert (prepared.compile.parts != {}) is (mode == "compile")
        for index in range(2):
            block = get(Measure(index=index, turn=3 * index, samples=6), Measured).block
            assert (block.index, block.turn, len(block.host_us)) == (index, 3 * index, 6)
            assert set(block.input_sets) == {0, 1, 2, 3}
            assert block.device_us is None
        assert (get(Collect(step="metrics"), Collected).metrics.graphs is not None) is (mode == "compile")
        one.ranks[0].send(Stop())
        await_exit(one.ranks, PATIENCE_S)
        assert one.ranks[0].exit_description() == "ended with exit code 0"
        assert one.ranks[0].receive() == ([], True)


def test_end_of_the_command_pipe_ends_an_idle_worker():
    read, write = os.pipe()
    os.close(write)
    command = [*WORKER_COMMAND, "--read", str(read), "--write", "2"]
    assert subprocess.run(command, pass_fds=[read], timeout=PATIENCE_S).returncode == 0
    os.close(read)


BUSY = """
    import subprocess, sys, time
    import suite.worker.live_cell, suite.worker.main

    class Busy:
        def __init__(self, spec, announce): ...

        def build(self):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            print("started", child.pid, flush=True)
            time.sleep(600)

    suite.worker.main.enter_environment = lambda spec: None
    suite.worker.live_cell.LiveCell = Busy
    sys.exit(suite.worker.main.main())
"""


RUNNER = "import subprocess, sys; subprocess.run(sys.argv[1:], close_fds=False, start_new_session=True)"


def test_worker_without_its_runner_ends_with_its_children(tmp_path):
    with worker(tmp_path, *PYTHON, RUNNER, *PYTHON, textwrap.dedent(BUSY)) as one:
        (runner,) = one.ranks
        runner.send(Prepare(spec=spec_of("EOS")))
        wait_until(lambda: runner.log_tail().startswith("started "), runner.log_tail)
        child = int(runner.log_tail().split()[1])
        assert living([child], within_s=0.0) == [child]
        os.kill(runner.pid, signal.SIGKILL)
        assert living([child], within_s=10.0) == []


def test_cell_environment_is_set_before_importing_torch(tmp_path):
    """In a process of its own: importing the worker imports no torch, and too late is an error."""
    made = spec_of("EOS", cache_dir=str(tmp_path / "new"), cpu_threads=3, compile_threads=5)
    script = f"""
        import os, sys
        from suite.worker.main import enter_environment
        from suite.worker.protocol import CellSpec
        assert "torch" not in sys.modules
        spec = CellSpec.model_validate_json({made.model_dump_json()!r})
        enter_environment(spec)
        print(*(os.environ[name] for name in (
            "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS",
            "OMP_NUM_THREADS", "TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL", "THP_MEM_ALLOC_ENABLE")))
        sys.modules["torch"] = sys
        try:
            enter_environment(spec)
        except RuntimeError as error:
            print(error)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    environment, late = result.stdout.splitlines()
    folders = [f"{tmp_path}/new/{name}" for name in ("inductor", "triton")]
    assert environment.split() == [*folders, "5", "3", "0", "1"]
    assert "before the cell's environment was set" in late
    assert (tmp_path / "new").is_dir()


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        caused(RuntimeError("backend failed"), torch.OutOfMemoryError("Tried to allocate")),
        MemoryError(),
    ],
)
@pytest.mark.parametrize("phase", ["build", "check", "wait", "compare", "compile", "warm-up", "measure", "metrics"])
def test_lack_of_memory_is_reported_in_any_phase(error, phase):
    assert status_of(error, phase) is Status.OOM


@pytest.mark.parametrize("phase", ["build", "check", "compile", "warm-up", "measure", "metrics"])
def test_other_errors_are_reported_with_their_phase(phase):
    answer = failure(ValueError("\n  no such size: 7\nmore"), phase)
    of_phase = {"build": Status.MODEL_FAIL_TO_LOAD, "compile": Status.COMPILE_ERROR}
    assert answer.status is of_phase.get(phase, Status.RUN_ERROR)
    assert answer.error == f"{phase}: ValueError: no such size: 7"


def test_failed_compilation_is_named_in_any_phase():
    def broken(graph, inputs):
        raise KeyError("boom")

    with pytest.raises(Exception, match="boom") as raised:
        torch.compile(lambda x: x + 1, backend=broken)(torch.ones(2))
    answer = failure(raised.value, "check")
    assert answer.status is Status.COMPILE_ERROR
    assert "KeyError: 'boom'" in answer.error  # the cause, not only the backend's name
    torch.compiler.reset()
