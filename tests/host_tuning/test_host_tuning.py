"""`host_tuning tune` and `restore` on a fake host: all of it or nothing, whatever fails and wherever it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures.fake_host import UUID, FakeGpus, FakeHost, end_process, fail, in_child

from host_tuning import state as state_module
from host_tuning import tune as tune_module
from host_tuning.errors import HostTuningError, Refused
from host_tuning.machine import CPU, SMT_CONTROL, format_cpus, parse_cpus
from host_tuning.plan import Wishes
from host_tuning.tune import restore, tune
from optimizations import atomic_file

ALL = Wishes(
    governor=True, frequency="base", no_turbo=True, c_states=True, smt_off=True, persistence=True, gpu_clock=1410
)
VENDORS = ("intel", "amd")


def silent(text: str) -> None:
    """Says nothing."""


class Case:
    """A fake host with its GPU and state file; `again()` is the same host seen by a process that starts later."""

    def __init__(self, root: Path, vendor: str = "intel") -> None:
        self.root, self.vendor = root, vendor
        self.host = FakeHost(root, vendor)
        self.gpus = FakeGpus(self.host)
        self.state = root / "run" / "state.json"

    def again(self) -> Case:
        return Case(self.root, self.vendor)

    def tune(self, wishes: Wishes = ALL) -> None:
        tune(wishes, self.host, self.gpus, self.state, silent)

    def restore(self) -> int:
        return restore(self.host, self.gpus, self.state, silent)

    def settings(self) -> dict[str, str]:
        """Return what a user can set, without the fake kernel's own notes."""
        return {name: text for name, text in self.host.snapshot().items() if not name.startswith("kernel/")}


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of state files are written here, and the disk need not have any of them."""
    monkeypatch.setattr(atomic_file.os, "fsync", lambda descriptor: None)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


@pytest.mark.parametrize("vendor", VENDORS)
def test_everything_is_changed_and_put_back(tmp_path: Path, vendor: str) -> None:
    case = Case(tmp_path, vendor)
    before = case.settings()
    case.tune()
    tuned = case.settings()
    policy = f"{CPU}/cpufreq/policy0"
    base = "2800000" if vendor == "intel" else "3100000"
    assert [tuned[f"{policy}/scaling_{end}_freq"] for end in ("min", "max")] == [base, base]
    assert tuned[f"{policy}/scaling_governor"] == "performance"
    assert tuned[f"{CPU}/cpu1/cpuidle/state2/disable"] == "1"
    assert tuned[f"{CPU}/cpu1/cpuidle/state1/disable"] == "0", "only deep states"
    assert tuned[SMT_CONTROL] == "off"
    assert json.loads(tuned["gpu.json"]) == {"persistence": True, "locked": 1410}
    changes = len(json.loads(case.state.read_text())["changes"])
    assert case.again().restore() == changes
    assert case.settings() == before
    assert not case.state.exists()


def each_write(root: Path, vendor: str = "intel", *, tuned: bool = False) -> Iterator[tuple[int, str, Case]]:
    """Yield the number and text of each write of `tune`, or of `restore` where the host is tuned, with a host."""
    whole = Case(root / "whole", vendor)
    whole.tune()
    if tuned:
        whole = whole.again()
        whole.restore()
    assert len(whole.host.steps) > 12
    for number, step in enumerate(whole.host.steps):
        case = Case(root / f"{number}", vendor)
        if tuned:
            case.tune()
        yield number, step, case.again()


@pytest.mark.parametrize(
    ("vendor", "hook"), [("intel", "before_step"), ("intel", "after_step"), ("amd", "before_step")]
)
def test_a_failure_at_any_write_leaves_everything_as_it_was(tmp_path: Path, vendor: str, hook: str) -> None:
    for number, step, case in each_write(tmp_path, vendor):
        before = case.settings()
        setattr(case.host, hook, fail(number))
        with pytest.raises(HostTuningError, match="everything is as it was before"):
            case.tune()
        assert case.settings() == before, step
        assert not case.state.exists()


@pytest.mark.parametrize("hook", ["before_step", "after_step"])
def test_restore_puts_everything_back_after_a_crash_at_any_write(tmp_path: Path, hook: str) -> None:
    for number, step, case in each_write(tmp_path):
        before = case.settings()
        setattr(case.host, hook, end_process(number))
        assert in_child(case.tune) == 9
        assert case.settings() != before or number == 0
        case.again().restore()
        assert case.settings() == before, step


def test_crash_of_restore_is_repaired_by_the_next_one(tmp_path: Path) -> None:
    before = Case(tmp_path / "untouched").settings()
    for number, step, case in each_write(tmp_path, tuned=True):
        case.host.after_step = end_process(number)
        assert in_child(case.restore) == 9
        case.again().restore()
        assert case.settings() == before, step


def test_values_that_cannot_be_restored_are_named_and_kept(tmp_path: Path) -> None:
    before = Case(tmp_path / "untouched").settings()
    for number, step, case in each_write(tmp_path, tuned=True):
        case.host.before_step = fail(number)
        with pytest.raises(HostTuningError, match=r"could not be put back: \w+ at .*run restore again"):
            case.restore()
        assert json.loads(case.state.read_text())["changes"] and case.settings() != before
        case.again().restore()
        assert case.settings() == before, step


def test_state_file_precedes_the_first_change(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    case.host.before_step = lambda number: seen.append(case.state.exists())
    case.tune(Wishes(governor=True))
    assert seen and all(seen)
    case.again().restore()

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    case = case.again()
    before = case.settings()
    monkeypatch.setattr(atomic_file.os, "fsync", full)
    with pytest.raises(HostTuningError, match="No space left on device; nothing was changed"):
        case.tune()
    assert case.host.steps == []
    assert case.settings() == before
    assert [path.name for path in case.state.parent.iterdir()] == [".lock"], "no part of a file is left"


def test_a_value_that_the_kernel_does_not_take_is_a_failure(case: Case) -> None:
    before = case.settings()
    governor = f"{CPU}/cpufreq/policy1/scaling_governor"
    case.host.after_step = lambda number: (
        case.host.put(governor, "powersave") if case.host.steps[number] == f"{governor} = performance" else None
    )
    with pytest.raises(HostTuningError, match=r"did not take it: .*policy1/scaling_governor holds 'powersave'"):
        case.tune()
    assert case.settings() == before


def test_a_dry_run_tells_each_write_and_makes_none(case: Case) -> None:
    before, told = case.settings(), []
    changes = tune(ALL, case.host, case.gpus, case.state, told.append, dry_run=True)
    assert case.settings() == before and case.host.steps == [] and not case.state.parent.exists()
    case.tune()
    assert len(told) == len(changes) == len(case.host.steps)
    for line, change, step in zip(told, changes, case.host.steps, strict=True):
        assert change.after in line
        assert change.target == UUID or change.target in step
        assert change.target in line
    told.clear()
    restore(case.host, case.gpus, case.state, told.append, dry_run=True)
    assert len(told) == len(changes) and case.state.exists()
    governor = f"{CPU}/cpufreq/policy0/scaling_governor"
    assert f"would write 'powersave' back to /{governor} (now 'performance')" in told
    assert told[0] == f"would unlock the graphics clock of {UUID}", "the last change first"


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (Wishes(), "name at least one setting"),
        (Wishes(frequency="9000"), "9000 MHz does not lie within 800000 to 3800000 kHz"),
        (Wishes(frequency="fast"), "'fast' is neither `base` nor a number of MHz"),
        (Wishes(gpu_clock=1411), "no clock of 1411 MHz; nearest: 1200, 1410, 1980"),
        (Wishes(gpu_clock=1410, gpu=3), "NVML shows no GPU 3"),
    ],
)
def test_impossible_changes_are_refused_before_any_change(case: Case, wishes: Wishes, message: str) -> None:
    before = case.settings()
    wishes = wishes if wishes.is_empty else replace(wishes, governor=True)
    with pytest.raises(Refused, match=message):
        case.tune(wishes)
    assert case.settings() == before and case.host.steps == []


def test_an_unknown_machine_is_refused_and_every_reason_is_named(tmp_path: Path) -> None:
    case = Case(tmp_path / "arm", "ARM")
    with pytest.raises(Refused) as refused:
        case.tune()
    for item in ("governor", "frequency", "turbo", "c_states", "smt"):
        assert f"{item}: CPU SYNTHETIC is not one of Intel and AMD" in str(refused.value)
    case = Case(tmp_path / "driver")
    case.host.put(f"{CPU}/cpufreq/policy2/scaling_driver", "cppc_cpufreq")
    with pytest.raises(Refused, match="cpufreq driver 'cppc_cpufreq' is not known"):
        case.tune(Wishes(governor=True))


def test_without_root_the_machine_itself_is_refused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_module.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(FakeHost, "is_real", property(lambda host: True))
    with pytest.raises(Refused, match="needs root; nothing was changed"):
        case.tune()
    assert case.host.steps == []
    assert len(tune(ALL, case.host, case.gpus, case.state, silent, dry_run=True)) > 20, "looking needs no rights"


def test_tuning_twice_is_refused_and_so_is_restoring_nothing(case: Case) -> None:
    with pytest.raises(Refused, match="nothing to restore"):
        case.restore()
    case.tune(Wishes(governor=True))
    with pytest.raises(Refused, match=r"tuned already, .*run restore first"):
        case.again().tune(Wishes(c_states=True))
    case.restore()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read the state file"),
        ('{"format": 7, "changes": []}', "format 7, this version reads 1"),
        ('{"format": 1, "changes": [{"item": "x"}]}', "a change has the fields"),
        (
            '{"format": 1, "changes": [{"item": "x", "kind": "file", "target": "../etc/passwd", "before": "", '
            '"after": ""}]}',
            "does not lie below the root",
        ),
        ('{"format": 1, "boot": "another", "changes": []}', "an earlier start of this machine"),
    ],
)
def test_a_state_file_that_is_not_ours_is_refused(case: Case, content: str, message: str) -> None:
    case.state.parent.mkdir()
    case.state.write_text(content)
    with pytest.raises(Refused, match=message):
        case.restore()
    assert case.host.steps == []


def test_two_at_once_are_refused(case: Case) -> None:
    with state_module.locked(case.state), pytest.raises(Refused, match="another tune or restore is at work"):
        case.tune()
    assert case.host.steps == []


@pytest.mark.parametrize("text", ["", "0", "0-3,8", "1,3,5", "2-2"])
def test_lists_of_cpus_are_read_and_printed_as_the_kernel_does(text: str) -> None:
    cpus = parse_cpus(text)
    assert parse_cpus(format_cpus(cpus)) == cpus
    assert format_cpus(cpus) == text.replace("2-2", "2")
