"""A run records its machine completely, without torch and without names of the machine."""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
from pathlib import Path

import pynvml
import pytest
from fixtures.fake_nvml import FakeNvml, nvml
from fixtures.synthetic_results import environment as synthetic

from suite.measure.environment import code_id, collect, cpu_info, differences, without_paths
from suite.measure.gpu import NoGpu, find_gpu, gpu_reader
from suite.results.schema import Environment, GpuState
from suite.results.store import REPOSITORY

__all__ = ["nvml"]


def test_first_gpu_is_described_by_nvml(nvml: FakeNvml) -> None:
    found = find_gpu()
    info = found.info
    assert (info.name, info.compute_capability, info.memory_bytes) == ("NVIDIA H200", "9.0", 141 * 2**30)
    assert (found.driver, found.count) == ("580.10", 2)
    assert "GPU-first" not in info.model_dump_json()
    assert nvml.open == 0


@pytest.mark.parametrize("visible", ["1", "1,0", "GPU-second"])
def test_gpu_is_the_one_cuda_shows_first(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert find_gpu().info.name == "NVIDIA Old"


@pytest.mark.parametrize("visible", ["", "-1", "7", "GPU-none"])
def test_hidden_or_unknown_gpu_is_no_gpu(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(NoGpu, match="no NVIDIA GPU"):
        find_gpu()
    assert nvml.open == 0


@pytest.fixture(scope="module")
def collected() -> Environment:
    paths = ["--out", str(Path.home() / "secret" / "run"), "--out=/data/me/run", "/data/me/run", "~/run", "--tp=1,2"]
    return collect("id", ["encore", "run", *paths], {"samples": 3})


def test_packages_leave_out_what_setuptools_brings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that imports it has its copies of other packages on the path."""
    for folder, name in ((tmp_path / "site", "seen"), (tmp_path / "site" / "setuptools" / "_vendor", "copied")):
        (info := folder / f"{name}-1.2.dist-info").mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        monkeypatch.syspath_prepend(str(folder))
    packages = collect("id", [], {}).packages
    assert packages["seen"] == "1.2"
    assert "copied" not in packages


def test_record_has_versions_settings_and_commit(collected: Environment) -> None:
    import torch

    assert collected.torch == torch.__version__
    assert collected.torch_cuda == torch.version.cuda
    assert collected.packages["torch"] == torch.__version__.split("+")[0]
    assert {"triton", "transformers", "numpy", "nvidia-ml-py"} <= collected.packages.keys()
    assert collected.settings == {"samples": 3}
    assert collected.code == code_id(REPOSITORY)
    assert collected.cpu.logical_cores == len(os.sched_getaffinity(0))
    assert collected.cpu.memory_bytes > 0
    assert collected.python == ".".join(map(str, sys.version_info[:3]))
    assert Environment.model_validate_json(collected.model_dump_json()) == collected


def test_record_names_neither_machine_nor_user_nor_paths(collected: Environment) -> None:
    text = collected.model_dump_json()
    for word in (str(REPOSITORY), str(Path.home()), sys.prefix, "/home/", "/tmp"):
        assert word not in text
    values = json.loads(text)
    words = {
        word for key in ("command_line", "platform", "run_id") for word in str(values[key]).replace("'", " ").split()
    }
    assert socket.gethostname() not in words
    assert getpass.getuser() not in words
    assert collected.command_line == ["encore", "run", "--out", "run", "--out=run", "run", "run", "--tp=1,2"]


def test_paths_in_texts_are_replaced_by_their_meaning() -> None:
    text = f"File {REPOSITORY}/suite/x.py, {sys.prefix}/lib, {Path.home()}/a and {Path.home()}less"
    assert without_paths(text).startswith("File ./suite/x.py, ")
    assert without_paths(text).endswith(f" ~/a and {Path.home()}less")
    assert str(REPOSITORY) not in without_paths(text)


def test_cpu_is_read_from_linux(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Fast CPU @ 3GHz\nprocessor\t: 1\nmodel name\t: x\n"
    )
    (tmp_path / "cpu" / "smt").mkdir(parents=True)
    (tmp_path / "cpu" / "smt" / "active").write_text("1\n")
    (tmp_path / "cpu" / "cpu0" / "cpufreq").mkdir(parents=True)
    (tmp_path / "cpu" / "cpu0" / "cpufreq" / "scaling_governor").write_text("performance\n")
    for node in ("node0", "node1", "has_cpu"):
        (tmp_path / "node" / node).mkdir(parents=True)
    found = cpu_info(tmp_path, tmp_path)
    assert (found.model, found.governor, found.smt, found.numa_nodes) == ("Fast CPU @ 3GHz", "performance", True, 2)


def test_environments_are_compared_by_relevant_fields() -> None:
    here = synthetic()
    assert here.gpu is not None
    other_card = here.gpu.model_copy(update={"memory_bytes": here.gpu.memory_bytes})
    same = here.model_copy(update={"run_id": "other", "created_at": "later", "command_line": [], "gpu": other_card})
    assert differences(here, same) == []
    other_model = here.gpu.model_copy(update={"name": "NVIDIA H100"})
    packages = {"torch": "0.0", "triton": "3.6"}
    different = here.model_copy(update={"gpu": other_model, "driver": "590.0", "packages": packages})
    assert differences(here, different) == [
        "driver: 580.0 there, 590.0 here",
        "gpu name: SYNTHETIC GPU there, NVIDIA H100 here",
        "package numpy: 0.0 there, None here",
        "package triton: None there, 3.6 here",
    ]


@pytest.mark.parametrize(
    ("there", "here", "found"),
    [
        ("a", "a", []),
        ("a", "b", ["code: aaaaaaaaaaaa there, bbbbbbbbbbbb here"]),
        ("a", None, ["git_commit: 1 there, 2 here", "git_dirty: False there, True here"]),
        (None, "b", ["git_commit: 1 there, 2 here", "git_dirty: False there, True here"]),
        (None, None, ["git_commit: 1 there, 2 here", "git_dirty: False there, True here"]),
    ],
)
def test_code_is_compared_by_id_and_otherwise_by_commit(there: str | None, here: str | None, found: list[str]) -> None:
    first = synthetic(git_commit="1", git_dirty=False, code=there and 64 * there)
    second = synthetic(git_commit="2", git_dirty=True, code=here and 64 * here)
    assert differences(first, second) == found


@pytest.mark.gpu
def test_nvml_describes_the_gpu_that_torch_uses() -> None:
    import torch

    seen = torch.cuda.get_device_properties(0)
    found = find_gpu().info
    assert found.name == seen.name
    assert found.compute_capability == f"{seen.major}.{seen.minor}"
    assert found.memory_bytes == pytest.approx(seen.total_memory, rel=0.05)


def test_reading_names_reasons_that_lower_clocks(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_reader("GPU-first")() == GpuState(throttle_reasons=["SwPowerCap"])
    mask = pynvml.nvmlClocksEventReasonHwThermalSlowdown | pynvml.nvmlClocksEventReasonGpuIdle
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda handle: mask)
    assert gpu_reader("GPU-first")() == GpuState(throttle_reasons=["HwThermalSlowdown"])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", nvml.not_supported)
    assert gpu_reader("GPU-first")() == GpuState(throttle_reasons=[])


def test_without_nvml_or_this_gpu_nothing_is_read(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_reader("GPU-third")() is gpu_reader(None)() is None
    monkeypatch.setattr(pynvml, "nvmlInit", nvml.not_supported)
    assert gpu_reader("GPU-first")() is None
