"""Reading results: strict, in a fixed order, with the place of what is wrong."""

from __future__ import annotations

import pytest
from fixtures.synthetic_results import GPU, cell, environment, failed_cell, write_run

from suite.report import provenance
from suite.report.runs import load_run, load_runs
from suite.results.errors import WrongUse
from suite.results.schema import HostUse, Status


def test_cells_come_by_workload_and_mode_in_any_order(tmp_path):
    cells = [
        cell("ST", "a-new-mode"),
        cell("ST", "graph"),
        cell("EOS", "graph"),
        cell("ST", "compile"),
        cell("EOS", "eager"),
    ]
    run = load_run(write_run(tmp_path, cells))
    found = {name: [item.mode for item in run.cells if item.workload == name] for name in run.labels}
    assert found == {"EOS": ["eager", "graph"], "ST": ["compile", "graph", "a-new-mode"]}
    assert [item.workload for item in run.cells] == ["EOS"] * 2 + ["ST"] * 3


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({}, None),
        ({"size": "tiny"}, "in tiny size"),
        ({"device": "cpu"}, "on the CPU"),
        ({"device": "cpu", "size": "tiny"}, "on the CPU and in tiny size"),
    ],
)
def test_smoke_runs_are_labelled(tmp_path, changes, where):
    run = load_run(write_run(tmp_path, [cell("EOS", "compile", **changes), cell("ST", "compile")]))
    warning = where and f"SMOKE RUN {where}: these numbers say nothing about performance"
    assert provenance.of_run(run).warning == warning


@pytest.mark.parametrize(("device", "name"), [("cuda", "SYNTHETIC GPU"), ("cpu", "CPU SYNTHETIC CPU")])
def test_caption_names_device_version_run_and_commit(tmp_path, device, name):
    """A run on the CPU of a machine with a GPU does not claim the GPU."""
    run = load_run(write_run(tmp_path, [cell(device=device)], environment(git_dirty=True)))
    caption = provenance.of_run(run).caption
    assert caption.startswith(f"{name}, PyTorch 0.0+synthetic")
    assert caption.endswith("run synthetic (commit 0123456789 + changes)")


def made_at(folder, run_id, day, cells, **changes):
    """A run of this day of January 2026, its commit made of the day's digit."""
    made = {"run_id": run_id, "created_at": f"2026-01-0{day}T00:00:00+00:00", "git_commit": str(day) * 40}
    return write_run(folder / f"{run_id}-{day}", cells, environment(**(made | changes)))


def test_all_rows_of_a_workload_are_of_its_newest_run(tmp_path):
    old = made_at(tmp_path, "old", 1, [cell(w, mode, 90.0) for w in ("EOS", "ST") for mode in ("compile", "graph")])
    new = made_at(tmp_path, "new", 2, [cell("ST", "compile"), failed_cell("ST", "placement", Status.OOM), cell("MMC")])
    for order in ([old, new], [new, old]):
        run = load_runs(order)
        taken = [(item.workload, item.mode, item.blocks[0].host_us[0] if item.blocks else None) for item in run.cells]
        assert taken == [
            ("EOS", "compile", 90.0),
            ("EOS", "graph", 90.0),
            ("MMC", "compile", 100.0),
            ("ST", "compile", 100.0),
            ("ST", "placement", None),
        ]
        assert [part.labels for part in run.parts] == [("EOS",), ("MMC", "ST")]


def taken_of(runs, workload="ST"):
    joined = load_runs(runs)
    return next(part.environment.run_id for part in joined.parts if workload in part.labels)


def st(*modes, failed=(), others=None):
    cells = [cell("ST", mode, others=others if mode == modes[0] else None) for mode in modes if mode not in failed]
    return [*cells, *(failed_cell("ST", mode, Status.OOM) for mode in failed)]


SHARDS = ["encore", "merge", "one", "two"]
"""The command of a run of two shards at the same time."""
CORES, GPU_AT_WORK, IDLE, UNKNOWN = (
    HostUse(cpu_cores=cores, gpus_at_work=gpus) for cores, gpus in ((1.2, None), (0.1, 1), (0.4, 0), (None, None))
)


@pytest.mark.parametrize(
    ("old", "new", "command_line", "taken"),
    [
        (st("compile"), st("compile"), SHARDS, "old"),
        (st("compile", "graph"), st("compile"), SHARDS, "old"),
        (st("compile"), st("compile", "graph"), SHARDS, "new"),
        (st("compile"), st("compile", failed=["compile"]), SHARDS, "new"),
        (st("compile", failed=["compile"]), st("compile", failed=["compile"]), SHARDS, "old"),
        (st("compile", failed=["compile"]), st("compile"), SHARDS, "new"),
        # One of its modes next to other programs is enough: ratios are of all.
        (st("compile", "graph"), st("compile", "graph"), ["encore", "run"], "new"),
        (st("compile", "graph"), st("compile", "graph", others=IDLE), ["encore", "run"], "new"),
        (st("compile", "graph"), st("compile", "graph", others=UNKNOWN), ["encore", "run"], "new"),
        (st("compile", "graph"), st("compile", "graph", others=CORES), ["encore", "run"], "old"),
        (st("compile", "graph"), st("compile", "graph", others=GPU_AT_WORK), ["encore", "run"], "old"),
        # Modes that capture whole iterations run next to a few others.
        (st("compile", "graph"), st("compile", "step"), ["encore", "run"], "old"),
        (st("compile", "graph"), st("compile", "graph", "callables"), ["encore", "run"], "new"),
        (st("compile", "graph", "step"), st("compile", "step"), ["encore", "run"], "new"),
        (st("compile", "graph"), st("compile"), ["encore", "run"], "new"),
        (st("compile", "graph"), st("compile", "of another version"), ["encore", "run"], "new"),
    ],
)
def test_newer_rows_replace_older_ones_without_a_loss(tmp_path, old, new, command_line, taken):
    runs = [
        made_at(tmp_path, "old", 1, old),
        made_at(tmp_path, "new", 2, [*new, cell("MMC", "compile")], command_line=command_line),
    ]
    assert taken_of(runs) == taken_of(runs[::-1]) == taken
    assert taken_of(runs, "MMC") == "new"
    assert taken_of([*runs, made_at(tmp_path, "later", 3, old)]) == "later"


def test_variants_of_a_workload_may_be_of_different_runs(tmp_path):
    old = made_at(tmp_path, "old", 1, [cell("ST", "compile"), cell("ST", "compile", variant="current")])
    new = made_at(tmp_path, "new", 2, [cell("ST", "compile")])
    assert [part.labels for part in load_runs([old, new]).parts] == [("ST (current)",), ("ST",)]


def test_only_workloads_that_no_run_has_are_missing(tmp_path):
    asked = {"workloads": ["EOS", "MMC", "ST"], "modes": ["compile", "graph"]}
    old = made_at(tmp_path, "old", 1, [cell("EOS", "compile")], settings=asked)
    new = made_at(tmp_path, "new", 2, [cell("ST", "compile")], settings=asked)
    assert load_runs([old, new]).missing == (("MMC", "compile"), ("MMC", "graph"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"driver": "570.1"},
            r"runs a of 2026-01-01T00:00:00 and b of 2026-01-02T00:00:00 differ in driver \(580.0 and 570.1\)",
        ),
        ({"torch": "9.9"}, r"PyTorch \(0.0 for CUDA 13.0 and 9.9 for CUDA 13.0\)"),
        ({"gpu": GPU.model_copy(update={"name": "OTHER"})}, r"GPU \(SYNTHETIC GPU and OTHER\)"),
        ({"gpu": None, "driver": None}, r"GPU \(SYNTHETIC GPU and CPU SYNTHETIC CPU\), driver \(580.0 and None\)"),
    ],
)
def test_runs_of_different_machines_are_refused(tmp_path, changes, message):
    runs = [made_at(tmp_path, "a", 1, [cell()]), made_at(tmp_path, "b", 2, [cell("ST")], **changes)]
    with pytest.raises(WrongUse, match=f"{message}.*encore report RUN --out DIR"):
        load_runs(runs)


def test_packages_of_one_pytorch_release_are_compatible(tmp_path):
    """A wheel of the index and one of a distribution spell the version differently."""
    runs = [
        made_at(tmp_path, "a", 1, [cell()], torch="2.11.0+cu130"),
        made_at(tmp_path, "b", 2, [cell("ST")], torch="2.11.0"),
    ]
    assert load_runs(runs).labels == ("EOS", "ST")
    other = made_at(tmp_path, "c", 3, [cell("MMC")], torch="2.11.0+cu128", torch_cuda="12.8")
    with pytest.raises(WrongUse, match="PyTorch"):
        load_runs([runs[0], other])


def test_run_given_twice_is_refused_but_not_two_of_one_second(tmp_path):
    one, other = (
        made_at(tmp_path / name, "same", 1, [cell(workload)], settings={"tag": name})
        for name, workload in (("a", "EOS"), ("b", "ST"))
    )
    assert load_runs([one, other]).labels == ("EOS", "ST")
    with pytest.raises(WrongUse, match=r"run same of 2026-01-01.* is given twice"):
        load_runs([one, other, one])


def test_provenance_names_each_run_and_that_of_a_row_its_own(tmp_path):
    a = made_at(tmp_path, "a", 1, [cell("EOS"), cell("ST")])
    origin = provenance.of_run(load_runs([a, made_at(tmp_path, "b", 2, [cell("ST", size="tiny")], git_dirty=True)]))
    assert origin.caption == (
        "SYNTHETIC GPU, PyTorch 0.0+synthetic, driver 580.0, run a (commit 1111111111), "
        "run b (commit 2222222222 + changes)"
    )
    assert origin.rows_by_run == (
        "Of run a: EOS, ST.",
        "Of run b: ST (tiny).",
    )
    of_st, of_tiny = origin.of_row("ST"), origin.of_row("ST (tiny)")
    assert (of_st.run_id, of_st.commit, of_st.warning) == ("run a", "1111111111", None)
    assert (of_tiny.run_id, of_tiny.commit) == ("run b", "2222222222 + changes")
    assert "SMOKE RUN" in of_tiny.warning and "SMOKE RUN" in origin.warning
    assert origin.of_row("geomean").run_id == "spans runs a, b"


def test_runs_of_the_same_name_are_distinguished(tmp_path):
    runs = [made_at(tmp_path, "run", day, [cell("EOS")]) for day in (1, 2)]
    assert provenance.of_run(load_runs(runs)).rows_by_run == (
        "Of run run of 2026-01-02T00:00:00: EOS.",
        "No row is of run run of 2026-01-01T00:00:00 (commit 1111111111): other runs have the workloads.",
    )
    origin = provenance.of_run(load_runs(runs))
    for said in (origin.caption, origin.run_id, origin.commit or ""):
        assert "2222222222" in said or "2026-01-02" in said
        assert "1111111111" not in said and "2026-01-01" not in said


def test_recorded_runs_that_do_not_fit_are_left_out(tmp_path):
    older = made_at(tmp_path, "older", 1, [cell("ST")], torch="2.0")
    newer = made_at(tmp_path, "newer", 2, [cell("EOS")])
    broken = made_at(tmp_path, "broken", 3, [cell("EOS")])
    (broken / "cells.jsonl").write_text("{}\n")
    joined = load_runs([older, newer, broken], leave_out=True)
    assert joined.labels == ("EOS",)
    assert [("older" in each, "broken" in each) for each in joined.remarks] == [(False, True), (True, False)]
    with pytest.raises(WrongUse, match=r"no run can be read; left out: .*cells\.jsonl line 1"):
        load_runs([broken], leave_out=True)
