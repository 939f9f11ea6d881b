"""Host use of other programs is separated from this run's own, and unknown use is not reported."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from manual_clock import Clock

from suite.results.schema import HostUse
from suite.run import blocks
from suite.run.blocks import watch_others
from suite.run.supervise import tree_cpu_s

BUSY = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass"


def test_started_processes_count_as_own_running_or_ended() -> None:
    before = tree_cpu_s(psutil.Process())
    grandchild = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
    subprocess.run([sys.executable, "-c", grandchild], check=True)
    ended = tree_cpu_s(psutil.Process())
    assert ended - before > 0.3
    with subprocess.Popen(
        [sys.executable, "-c", BUSY + "\nprint(1, flush=True)\ninput()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as running:
        assert running.stdout is not None and running.stdout.readline()
        assert tree_cpu_s(psutil.Process()) - ended > 0.3, "it has used 0.4 s, counted in ticks"
        running.communicate(b"\n")


@pytest.mark.parametrize(
    ("host_s", "own_s", "cores"),
    [(45.0, 30.0, 1.5), (29.9, 30.0, 0.0), (0.0, 1.0, None)],
    ids=["rest", "rounded ticks", "no counters"],
)
def test_foreign_time_is_the_rest_of_the_hosts_time(
    monkeypatch: pytest.MonkeyPatch, host_s: float, own_s: float, cores: float | None
) -> None:
    clock, host, own = Clock(monkeypatch, blocks), iter([1000.0, 1000.0 + host_s]), iter([50.0, 50.0 + own_s])
    monkeypatch.setattr(blocks, "_host_cpu_s", lambda: next(host))
    monkeypatch.setattr(blocks, "tree_cpu_s", lambda process: next(own))
    others = watch_others()
    clock.pass_us(10_000_000)
    assert others() == HostUse(cpu_cores=cores)


def test_host_use_counts_a_foreign_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the kernel tells: the child's time is taken for another program's."""
    monkeypatch.setattr(blocks, "tree_cpu_s", lambda process: 0.0)
    others = watch_others()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    found = others()
    if found.cpu_cores is None:
        pytest.skip("the kernel here counts no processor time")
    assert found.cpu_cores > 0
