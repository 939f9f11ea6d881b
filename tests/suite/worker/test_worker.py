"""Workers over real pipes: tiny workloads, every failure, and no process that outlives its runner."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from suite.results.schema import CompileConditions, Record, Status
from suite.worker.main import failure, status_of
from suite.worker.protocol import (
    REPLIES,
    CellSpec,
    Collect,
    Collected,
    Compile,
    Done,
    Failed,
    Measure,
    Measured,
    Phase,
    Prepare,
    Prepared,
    Reply,
    Settle,
    Stop,
    encode,
)

PATIENCE_S = 250.0


class Peer:
    """The runner's side of a worker's pipes."""

    def __init__(self, *command: str, log: Path) -> None:
        theirs_read, self._write = os.pipe()
        read, theirs_write = os.pipe()
        arguments = ["--read", str(theirs_read), "--write", str(theirs_write)]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, *arguments], pass_fds=(theirs_read, theirs_write), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        os.close(theirs_read)
        os.close(theirs_write)
        self._replies = os.fdopen(read, "rb")
        self.log = log
        self.phases: list[str] = []

    def send(self, command: Record) -> None:
        os.write(self._write, encode(command))

    def answer(self) -> Reply | None:
        """The next reply that is no phase; None at the end of the pipe."""
        for line in self._replies:
            reply = REPLIES.validate_json(line)
            if not isinstance(reply, Phase):
                return reply
            self.phases.append(reply.name)
        return None

    def hang_up(self) -> None:
        os.close(self._write)
        self._write = -1

    def close(self) -> None:
        if self._write >= 0:
            self.hang_up()
        self.process.kill()
        self.process.wait()
        self._replies.close()


@pytest.fixture
def worker(tmp_path) -> Iterator[Peer]:
    peer = Peer(sys.executable, "-P", "-m", "suite.worker.main", log=tmp_path / "log")
    yield peer
    peer.close()


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def spec(cache_dir):
    def make(workload: str = "EOS", mode: str = "eager", **changes: object) -> CellSpec:
        fields = {
            "workload": workload, "variant": "published", "size": "tiny", "mode": mode, "device": "cpu",
            "with_optimizer": False, "seed": 1337, "input_sets": 4, "warm_up": 8, "check_inputs": 2,
            "cpu_threads": 1, "cache_dir": cache_dir, "warm_cache": True,
        }  # fmt: skip
        return CellSpec(**{**fields, **changes})

    return make


def test_program_that_ends_its_process_is_a_failure_with_reason(spec, tmp_path):
    code = """
        import sys
        from suite.worker import main as worker
        worker.enter_environment = lambda spec: sys.exit("ERROR: no data")
        worker.main()
    """
    peer = Peer(sys.executable, "-c", textwrap.dedent(code), log=tmp_path / "log")
    try:
        peer.send(Prepare(spec=spec()))
        failed = peer.answer()
        assert isinstance(failed, Failed), peer.log.read_text()
        assert (failed.status, failed.error) == (Status.MODEL_FAIL_TO_LOAD, "build: SystemExit: ERROR: no data")
    finally:
        peer.close()


@pytest.mark.parametrize(("workload", "mode"), [("EOS", "eager"), ("ALNET", "eager"), ("EOS", "compile")])
def test_real_workload_from_prepare_to_stop(worker, spec, workload, mode):
    worker.send(Prepare(spec=spec(workload, mode)))
    built = worker.answer()
    assert isinstance(built, Done), (built, worker.log.read_text())
    assert worker.phases == ["build", "check"]
    worker.send(Compile(conditions=CompileConditions.COLD_ALONE))
    assert isinstance(worker.answer(), Done), worker.log.read_text()
    worker.send(Settle())
    prepared = worker.answer()
    assert isinstance(prepared, Prepared), (prepared, worker.log.read_text())
    assert worker.phases == ["build", "check", "compile", "warm-up", "wait", "compare"]
    assert prepared.correctness.passed and prepared.correctness.deterministic
    assert len(set(prepared.correctness.digests)) == 2
    assert prepared.input_bytes > 0 and prepared.iteration_us > 0
    assert prepared.compile.conditions is CompileConditions.COLD_ALONE
    assert (prepared.compile.parts != {}) is (mode == "compile")

    for index in range(2):
        worker.send(Measure(index=index, turn=3 * index, samples=6))
        measured = worker.answer()
        assert isinstance(measured, Measured)
        block = measured.block
        assert (block.index, block.turn, len(block.host_us)) == (index, 3 * index, 6)
        assert set(block.input_sets) == {0, 1, 2, 3}
        assert block.device_us is None

    worker.send(Collect(step="metrics"))
    collected = worker.answer()
    assert isinstance(collected, Collected)
    assert (collected.metrics.graphs is not None) is (mode == "compile")
    worker.send(Stop())
    assert worker.process.wait(PATIENCE_S) == 0
    assert worker.answer() is None


def test_end_of_the_command_pipe_ends_an_idle_worker(worker):
    worker.hang_up()
    assert worker.process.wait(PATIENCE_S) == 0


BUSY = """
    import subprocess, sys, time
    import suite.worker.live_cell, suite.worker.main

    class Busy:
        def __init__(self, spec, announce):
            self.announce = announce

        def build(self):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            print(child.pid, flush=True)
            self.announce("compile")
            time.sleep(600)

    suite.worker.main.enter_environment = lambda spec: None
    suite.worker.live_cell.LiveCell = Busy
    sys.exit(suite.worker.main.main())
"""


RUNNER = "import subprocess, sys; subprocess.run(sys.argv[1:], close_fds=False, start_new_session=True)"


def test_worker_without_its_runner_ends_with_its_children(spec, tmp_path):
    python = (sys.executable, "-P", "-c")
    peer = Peer(*python, RUNNER, *python, textwrap.dedent(BUSY), log=tmp_path / "log")
    try:
        peer.send(Prepare(spec=spec()))
        first = REPLIES.validate_json(peer._replies.readline())
        assert first == Phase(name="compile")
        child = int(peer.log.read_text().split()[0])
        assert psutil.pid_exists(child)
        peer.process.kill()
        deadline = time.monotonic() + 10
        while _lives(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _lives(child)
    finally:
        peer.close()


def _lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_cell_environment_is_set_before_importing_torch(tmp_path, spec):
    """In a process of its own: importing the worker imports no torch, and too late is an error."""
    made = spec(cache_dir=str(tmp_path / "new"), cpu_threads=3, compile_threads=5)
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
