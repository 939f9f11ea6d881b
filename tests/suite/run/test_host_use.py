"""Host use of other programs is separated from this run's own, and unknown use is not reported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from suite.results.schema import HostUse
from suite.run import host_use
from suite.run.host_use import HostSample, between, most, own_cpu_s, sample_host

BUSY = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass"


def test_started_processes_count_as_own_running_or_ended() -> None:
    before = own_cpu_s()
    grandchild = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
    subprocess.run([sys.executable, "-c", grandchild], check=True)
    ended = own_cpu_s()
    assert ended - before > 0.3
    with subprocess.Popen(
        [sys.executable, "-c", BUSY + "\nprint(1, flush=True)\ninput()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as running:
        assert running.stdout is not None and running.stdout.readline()
        assert own_cpu_s() - ended > 0.3, "it has used 0.4 s, counted in ticks"
        running.communicate(b"\n")


def test_foreign_time_is_the_rest_of_the_hosts_time() -> None:
    first = HostSample(10.0, 1000.0, 50.0)
    assert between(first, HostSample(20.0, 1045.0, 80.0)) == HostUse(cpu_cores=1.5)
    assert between(first, HostSample(20.0, 1029.9, 80.0)) == HostUse(cpu_cores=0.0), "ticks are rounded"
    assert between(HostSample(1.0, 0.0, 0.0), HostSample(2.0, 0.0, 1.0)) == HostUse(cpu_cores=None), (
        "the kernel counts nothing"
    )
    assert most([HostUse(cpu_cores=0.1), HostUse(cpu_cores=None), HostUse(cpu_cores=2.0)]) == HostUse(cpu_cores=2.0)
    assert most([]) is None


def test_host_use_counts_a_foreign_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the kernel tells: the child's time is taken for another program's."""
    monkeypatch.setattr(host_use, "own_cpu_s", lambda: 0.0)
    before = sample_host()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    found = between(before, sample_host())
    if found.cpu_cores is None:
        pytest.skip("the kernel here counts no processor time")
    assert found.cpu_cores > 0
