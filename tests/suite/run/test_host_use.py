"""What other programs do on the host: told apart from this run's own, and nothing said of what is not known."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from fixtures.fake_nvml import FakeNvml, nvml

from suite.measure.gpu import OtherGpu, other_gpus
from suite.results.schema import HostUse
from suite.run import host_use
from suite.run.host_use import Look, between, look, most, own_cpu_s

__all__ = ["nvml"]

BUSY = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass"
IDLE, WORKING = OtherGpu(0, 0), OtherGpu(2, 60)


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


def test_others_have_what_of_the_hosts_time_is_not_its_own() -> None:
    first = Look(10.0, 1000.0, 50.0, (IDLE, IDLE))
    assert between(first, Look(20.0, 1045.0, 80.0, (IDLE, WORKING))) == HostUse(
        cpu_cores=1.5, gpus_at_work=1, gpu_processes=2
    )
    alone = between(first, Look(20.0, 1029.9, 80.0, (IDLE, IDLE)))
    assert alone == HostUse(cpu_cores=0.0, gpus_at_work=0, gpu_processes=0), "ticks are rounded"


def test_what_is_not_known_is_not_zero() -> None:
    counts_nothing = between(Look(1.0, 0.0, 0.0, None), Look(2.0, 0.0, 1.0, None))
    assert counts_nothing == HostUse(cpu_cores=None, gpus_at_work=None, gpu_processes=None)
    once = between(Look(1.0, 0.0, 0.0, None), Look(2.0, 1.0, 1.0, (WORKING,)))
    assert (once.gpus_at_work, once.gpu_processes) == (1, 2)
    silent = OtherGpu(None, None)
    assert between(Look(1.0, 0.0, 0.0, (silent,)), Look(2.0, 1.0, 1.0, (silent,))).gpus_at_work == 0


def test_of_several_processes_the_worst_is_told() -> None:
    quiet, loud = (
        HostUse(cpu_cores=0.1, gpus_at_work=1, gpu_processes=None),
        HostUse(cpu_cores=2.0, gpus_at_work=0, gpu_processes=3),
    )
    assert most([quiet, loud]) == HostUse(cpu_cores=2.0, gpus_at_work=1, gpu_processes=3)
    assert most([]) is None


def test_host_use_counts_a_foreign_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the kernel tells: the child's time is taken for another program's."""
    monkeypatch.setattr(host_use, "own_cpu_s", lambda: 0.0)
    before = look(0)
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    found = between(before, look(0))
    if found.cpu_cores is None:
        pytest.skip("the kernel here counts no processor time")
    assert found.cpu_cores > 0 and found.gpus_at_work is None


def test_a_run_without_a_driver_tells_nothing_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    assert look(1).gpus is None


def _uses(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, name: str, processes: int, percent: int) -> None:
    device = next(one for one in nvml.devices if one["uuid"] == name)
    device.update(processes=processes, percent=percent)
    monkeypatch.setattr(
        pynvml,
        "nvmlDeviceGetComputeRunningProcesses",
        lambda handle: [None] * handle.get("processes", 0),
        raising=False,
    )
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetUtilizationRates", lambda handle: SimpleNamespace(gpu=handle.get("percent", 0))
    )


@pytest.mark.parametrize(
    ("visible", "own", "found"),
    [
        (None, 1, [OtherGpu(1, 90)]),
        ("1", 1, [OtherGpu(0, 0)]),
        ("GPU-second,GPU-first", 1, [OtherGpu(0, 0)]),
        ("1,0", 2, []),
    ],
)
def test_gpus_beside_are_those_that_the_run_does_not_use(
    nvml: FakeNvml,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    own: int,
    found: list[OtherGpu],
) -> None:
    _uses(nvml, monkeypatch, "GPU-second", 1, 90)
    assert other_gpus(own, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == found


def test_parts_of_a_gpu_tell_nothing(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.devices[0]["uuid"] = "MIG-first"
    _uses(nvml, monkeypatch, "GPU-second", 1, 90)
    assert other_gpus(1, {}) is None


def test_a_gpu_that_does_not_answer_is_left_out(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.devices.append({"name": "lost", "uuid": "GPU-lost"})
    _uses(nvml, monkeypatch, "GPU-second", 1, 90)

    def uuid(handle: dict[str, Any]) -> str:
        if handle["name"] == "lost":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return str(handle["uuid"])

    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", uuid)
    assert other_gpus(1, {}) == [OtherGpu(1, 90)]
