"""Halves, blocks, durations, settings and estimates: plain values in, plain values out."""

from __future__ import annotations

import itertools
from collections import Counter
from datetime import datetime
from typing import Any

import pytest
from fixtures.fake_command import run_command
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import paths, read_recorded

from models import registry
from models.registry import TP_MARK, UnknownWorkload, find
from suite.measure.modes import MODES
from suite.results.errors import WrongUse
from suite.results.schema import Cell
from suite.run import launch
from suite.run.matrix import parse_degrees, select_modes_for, select_workloads, split_names
from suite.run.schedule import (
    BLOCK_US,
    DEFAULT_ESTIMATE_S,
    ESTIMATE_MARGIN,
    ESTIMATED_MODES,
    LEAD_IN_US,
    LONG_ITERATION_US,
    MOST_LEAD_IN,
    MOST_SAMPLES,
    SLOW_S,
    estimated_seconds,
    halves,
    least_blocks,
    orders,
    sampling_for,
)
from suite.settings import QUICK, RunSettings, format_duration, parse_duration
from suite.worker.protocol import core_for


@given(st.floats(10.0, 1e6))
def test_blocks_take_milliseconds_whatever_an_iteration_takes(iteration_us: float) -> None:
    lead_in, samples = sampling_for(iteration_us, RunSettings())
    least = 2 if iteration_us < LONG_ITERATION_US else 1
    assert 2 <= samples <= MOST_SAMPLES and least <= lead_in <= MOST_LEAD_IN
    assert lead_in * iteration_us >= min(LEAD_IN_US, MOST_LEAD_IN * iteration_us)
    if iteration_us > BLOCK_US / MOST_SAMPLES:
        assert samples * iteration_us >= BLOCK_US
        assert samples == 2 or (samples - 1) * iteration_us < BLOCK_US
    assert sampling_for(iteration_us, RunSettings(samples=30))[1] == 30


def test_each_process_and_each_rank_begins_on_a_core_of_its_own() -> None:
    cores = [10, 11, 12, 13, 14, 15, 16, 17]
    assert [core_for(0, cores, process=process) for process in (0, 1, 9)] == [10, 11, 11]
    assert [core_for(block, cores, process=7) for block in (0, 9, 10)] == [17, 17, 10]
    assert [core_for(block, [3, 5]) for block in (0, 9, 10, 19, 20)] == [3, 3, 5, 5, 3], "blocks rotate it"
    assert [core_for(0, cores, process=1, rank=rank, ranks=3) for rank in range(3)] == [11, 13, 15]
    assert core_for(0, [7]) is core_for(0, []) is core_for(0, cores[:2], ranks=3) is None, "not a core for each"


def test_long_blocks_are_halved_in_number() -> None:
    settings = RunSettings(blocks=21, measure_s=7.0)
    assert [least_blocks(seconds, settings) for seconds in (0.0, 6.9, 7.0, 100.0)] == [21, 21, 11, 11]
    short = RunSettings(blocks=20, measure_s=0.0)
    assert [least_blocks(seconds, short) for seconds in (0.0, 4.9, 5.0)] == [20, 20, 10]


def test_orders_hold_each_mode_once_and_vary_the_neighbours() -> None:
    names = ["eager", "compile", "graph", "placement"]
    drawn = list(itertools.islice(orders(names, "a"), 200))
    assert drawn == list(itertools.islice(orders(names, "a"), 200))
    assert drawn != list(itertools.islice(orders(names, "b"), 200))
    assert all(sorted(order) == sorted(names) for order in drawn)
    before = Counter(one for order in drawn for one, two in itertools.pairwise(order) if two == "compile")
    assert min(before[name] for name in ("eager", "graph", "placement")) > 30


def seconds_by_recorded_rows() -> dict[str, float]:
    """Return each workload's seconds in the newest recorded run on H200s in which all of its modes were timed.

    Mode `lanes` is newer than the runs; estimates scale with the number of modes.
    """
    modes = {mode.name for mode in select_modes_for("cuda", None)} - {"lanes"}
    found: dict[str, float] = {}
    for path in paths():
        run = read_recorded(path)
        rows: dict[str, list[Cell]] = {}
        for row in run.cells:
            in_full = row.size == "full" and row.device == "cuda" and TP_MARK not in row.workload
            if in_full and row.blocks:
                rows.setdefault(row.workload, []).append(row)
        for workload, own in rows.items():
            if run.environment.gpu and "H200" in run.environment.gpu.name and modes <= {row.mode for row in own}:
                begun = [datetime.fromisoformat(row.started_at).timestamp() for row in own]
                ended = [at + row.wall_s for at, row in zip(begun, own, strict=True)]
                found[workload] = max(ended) - min(begun)
    return found


def test_estimates_hold_for_the_newest_recorded_rows() -> None:
    recorded = seconds_by_recorded_rows()
    assert recorded.keys() >= SLOW_S.keys()
    usual_s = {name: DEFAULT_ESTIMATE_S["full", registry.find(name).task] for name in recorded.keys() - SLOW_S.keys()}
    off = {name: (SLOW_S[name], s) for name, s in recorded.items() if abs(SLOW_S.get(name, s) - s) > 0.25 * s}
    off |= {name: (most_s, recorded[name]) for name, most_s in usual_s.items() if recorded[name] > most_s}
    assert not off, "put the newer seconds into suite/run/schedule.py"
    assert len(select_modes_for("cuda", None)) == ESTIMATED_MODES + 1, "and `lanes`"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (
            "eager compile graph graph-unpartitioned placement indirection",
            ["compile graph eager graph-unpartitioned", "compile graph placement indirection"],
        ),
        (
            "compile graph graph-unpartitioned placement indirection",
            ["compile graph graph-unpartitioned", "compile graph placement indirection"],
        ),
        ("eager compile placement indirection", ["compile eager", "compile placement indirection"]),
        ("compile graph indirection", []),
        ("eager graph-unpartitioned placement indirection", []),
    ],
)
def test_halves_share_the_baselines_and_are_more_than_pairs(wanted: str, expected: list[str]) -> None:
    modes = [MODES[name] for name in wanted.split()]
    assert [" ".join(mode.name for mode in half) for half in halves(modes)] == expected


def test_estimates_are_recorded_seconds_with_a_margin() -> None:
    def seconds(name: str, size: str = "full", device: str = "cuda", modes: int = ESTIMATED_MODES) -> float:
        return estimated_seconds(name, "inference", size=size, device=device, modes=modes)

    assert seconds("VM") == seconds("VM", modes=1) == ESTIMATE_MARGIN * SLOW_S["VM"]
    assert seconds("VM", modes=2 * ESTIMATED_MODES) == pytest.approx(2 * ESTIMATE_MARGIN * SLOW_S["VM"])
    for name, size, device in (("VM", "tiny", "cuda"), ("VM", "full", "cpu"), ("NEW", "full", "cuda")):
        assert seconds(name, size, device) == ESTIMATE_MARGIN * DEFAULT_ESTIMATE_S[size, "inference"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("9m", 540), ("90s", 90), ("1h30m", 5400), ("45", 45), ("0.5h", 1800), (" 2m5s ", 125)]
)
def test_duration_is_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text, "--budget") == seconds


@pytest.mark.parametrize("text", ["", "0", "0m", "-5m", "ten", "5 m m", "5d", "m"])
def test_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(WrongUse, match="--budget"):
        parse_duration(text, "--budget")


@given(st.integers(1, 500_000))
def test_written_duration_reads_back(seconds: int) -> None:
    written = format_duration(seconds)
    assert abs(parse_duration(written, "x") - seconds) < (60 if "h" in written else 1)


@pytest.mark.parametrize(("given", "processes"), [({}, 3), ({"processes": 6}, 6), ({"device": "cpu"}, 1)])
def test_modes_start_three_times_on_a_gpu_and_once_on_a_cpu(given: dict[str, Any], processes: int) -> None:
    assert RunSettings(**given).checked().processes == processes
    assert RunSettings(**{**given, "processes": 2}).checked().processes == 2


def test_sets_and_names_choose_each_workload_once() -> None:
    sets = registry.sets()
    assert {"grace", "pygraph", "all"} <= set(sets)
    for name, members in sets.items():
        assert [workload for workload, _ in select_workloads([], None, name)] == members
    pygraph = {workload.acronym for workload, _ in select_workloads([], None, "PyGraph")}
    assert {"EOS", "XLNET-T"} <= pygraph and "DNET" not in pygraph
    chosen = select_workloads(["eos", "MMC", "EOS"], None)
    assert [(workload.acronym, variant) for workload, variant in chosen] == [("EOS", "published"), ("MMC", "published")]
    both = [(workload.acronym, variant) for workload, variant in select_workloads(["MMC", "EOS"], "published,current")]
    assert both == [("MMC", "published"), ("MMC", "current"), ("EOS", "published")]
    assert len(select_workloads([], None)) == len(registry.workloads())
    QUICK.settings.checked()
    assert {workload.task for workload, _ in select_workloads(QUICK.workloads, None)} == {"inference", "training"}
    assert {variant for _, variant in select_workloads([], "current")} == {"current"}
    assert 0 < len(select_workloads([], "current")) < len(registry.workloads())


def test_modes_with_cuda_graphs_need_a_gpu() -> None:
    assert [mode.name for mode in select_modes_for("cpu", None)] == ["eager", "compile"]
    usual = [mode.name for mode in select_modes_for("cuda", None)]
    assert usual == [name for name in MODES if name not in ("step", "callables", "by-hand")]


def test_degrees_and_names_are_checked() -> None:
    assert parse_degrees("1, 2,4,2") == (1, 2, 4)
    assert split_names(["xlnet-i"], (1, 2), None) == ["XLNET-I@tp1", "XLNET-I@tp2"]
    everything = split_names([], (2,), None)
    assert everything == [f"{name}@tp2" for name in ("DALLE2", "DECODER", "ST", "VM", "XLNET-I")]


def test_split_workload_is_a_row_of_its_own() -> None:
    row = find("xlnet-i@tp4")
    assert (row.acronym, row.tp, row.batch, row.sets) == ("XLNET-I@tp4", 4, 128, ())
    assert find("DALLE2@tp1").batch == 2
    for name in ("EOS@tp2", "XLNET-I@tp0", "XLNET-I@tp", "XLNET-I@tpx", "NONE@tp2"):
        with pytest.raises(UnknownWorkload):
            find(name)


def test_more_gpus_than_there_are_is_wrong_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_gpu", lambda: None)
    monkeypatch.setattr(launch, "visible_gpus", lambda: ["0", "1"])
    done = run_command(("run", "XLNET-I", "--tp", "2,4"))
    assert done.returncode == 2
    assert "XLNET-I@tp4: 2 GPUs can be used here" in done.stderr
