"""`host_tuning check`: each finding turns with the thing it is about, and nothing is written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fixtures.fake_host import PCI, FakeGpus, FakeHost

from host_tuning import Disturbance, check
from host_tuning import __main__ as command_line
from host_tuning.check import Finding
from host_tuning.machine import BOOST, CPU, NO_TURBO, SMT_CONTROL
from suite.results.store import REPOSITORY

ITEMS = (
    "governor", "frequency", "turbo", "c_states", "smt", "load", "numa", "gpu_processes", "gpu_clock",
    "gpu_persistence", "gpu_throttling",
)  # fmt: skip


def findings(host: FakeHost, **gpu: object) -> dict[str, Finding]:
    return {finding.item: finding for finding in check(host, FakeGpus(host, **gpu))}


def test_a_host_as_it_comes_is_warned_of_and_nothing_is_written(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    FakeGpus(host)
    before = host.snapshot()
    found = findings(host)
    assert tuple(found) == ITEMS
    warned = {item for item, finding in found.items() if finding.verdict is Disturbance.WARN}
    assert warned == {"governor", "frequency", "turbo", "c_states", "smt", "numa", "gpu_persistence"}
    assert all(finding.why for finding in found.values())
    assert all(finding.advice for finding in found.values() if finding.verdict is Disturbance.WARN)
    assert found["c_states"].value == "C6 (170 us)"
    assert found["frequency"].value == "800 to 3800 MHz"
    assert host.snapshot() == before and host.steps == []


@pytest.mark.parametrize("vendor", ["intel", "amd"])
def test_a_quiet_host_is_not_warned_of(tmp_path: Path, vendor: str) -> None:
    host = FakeHost(tmp_path, vendor)
    for cpu in range(4):
        policy = f"{CPU}/cpufreq/policy{cpu}"
        host.put(f"{policy}/scaling_governor", "performance")
        host.put(f"{policy}/scaling_min_freq", "2800000")
        host.put(f"{policy}/scaling_max_freq", "2800000")
        host.put(f"{CPU}/cpu{cpu}/cpuidle/state2/disable", "1")
    host.put(NO_TURBO if vendor == "intel" else BOOST, "1" if vendor == "intel" else "0")
    host.put(SMT_CONTROL, "off")
    host.put(f"sys/bus/pci/devices/{PCI}/local_cpulist", "0-3")
    found = findings(host, persistence=True)
    assert {item: finding.value for item, finding in found.items() if finding.verdict is Disturbance.WARN} == {}
    assert found["gpu_clock"].verdict is Disturbance.UNKNOWN, "a lock cannot be read"


@pytest.mark.parametrize(
    ("gpu", "item", "value"),
    [
        ({"other_processes": 2}, "gpu_processes", "2 others"),
        ({"throttling": ("SwPowerCap",)}, "gpu_throttling", "SwPowerCap"),
        ({"persistence": False}, "gpu_persistence", "off"),
    ],
)
def test_what_nvml_tells_of_the_gpu_is_judged(tmp_path: Path, gpu: dict[str, object], item: str, value: str) -> None:
    finding = findings(FakeHost(tmp_path), **gpu)[item]
    assert (finding.verdict, finding.value) == (Disturbance.WARN, value)


def test_silent_machine_gives_unknowns_and_no_guess(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    host = FakeHost(tmp_path)
    found = {finding.item: finding for finding in check(host, FakeGpus(host), gpu_index=1)}
    assert set(found) == {"governor", "frequency", "turbo", "c_states", "smt", "load", "gpu"}
    assert {finding.verdict for finding in found.values()} == {Disturbance.UNKNOWN}


def test_command_prints_json_and_exits_with_1_for_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FakeHost(tmp_path)
    assert command_line.main(["check", "--json", "--root", str(tmp_path)]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert {"item": "smt", "verdict": "warn", "value": "on"}.items() <= {each["item"]: each for each in printed}[
        "smt"
    ].items()
    assert all(set(each) == {"item", "verdict", "value", "why", "advice"} for each in printed)
    assert command_line.main(["check", "--root", str(tmp_path)]) == 1
    assert "WARN    smt" in capsys.readouterr().out


def test_documentation_names_every_item_and_only_real_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = (REPOSITORY / "docs" / "host_tuning.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert tuple(table) == ITEMS
    helps = ""
    for command in ("check", "tune", "restore"):
        with pytest.raises(SystemExit):
            command_line.main([command, "--help"])
        helps += capsys.readouterr().out
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    assert named and named <= set(re.findall(r"--[a-z-]+", helps))
