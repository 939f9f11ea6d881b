"""`encore compare` finds slower rows, reports undecided ones, and names rows without a partner."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures.fake_command import run_command
from fixtures.synthetic_results import GPU, cell, environment, failed_cell, timed, write_run

from suite.measure.kernels import kernel_key
from suite.report.runs import load_runs
from suite.report.two_runs.pairs import Comparison, Outcome, Pair, compare_runs
from suite.results.errors import EXIT_FINDING, EXIT_OK, EXIT_UNDECIDED, EXIT_WRONG_USE, WrongUse
from suite.results.schema import Cell, Environment, Status

STOCK = ("eager", "compile", "graph", "graph-unpartitioned")
SEED = 7
Compare = Callable[..., Comparison]


def cells(factors: dict[str, float] | None = None, drift: float = 1.0, workload: str = "EOS") -> list[Cell]:
    """A workload in stock modes and placement; `drift` slows all of them, `factors` single modes."""
    return [
        cell(workload, mode, 100.0 * drift * (factors or {}).get(mode, 1.0), seed=SEED)
        for mode in (*STOCK, "placement")
    ]


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    """Writes two runs and compares them."""

    def work(base: Iterable[Cell], new: Iterable[Cell], of: Environment | None = None, **options: Any) -> Comparison:
        write_run(tmp_path / "base", base, environment(run_id="base"))
        write_run(tmp_path / "new", new, of or environment(run_id="new"))
        return compare_runs(*(load_runs([tmp_path / name]) for name in ("base", "new")), **options)

    return work


def pair(comparison: Comparison, mode: str, label: str = "EOS") -> Pair:
    (found,) = (each for each in comparison.pairs if (each.label, each.mode) == (label, mode))
    return found


def test_slower_mode_is_a_regression(compare: Compare) -> None:
    made = compare(cells(), cells({"placement": 1.3}))
    assert made.regressions == ("EOS placement",) and made.exit_code == EXIT_FINDING
    worse = pair(made, "placement")
    assert (worse.outcome, worse.baseline) == (Outcome.REGRESSION, "graph")
    assert worse.ratios == pytest.approx((1.0, 1 / 1.3), rel=0.01)
    assert worse.change is not None and worse.change.value == pytest.approx(1 / 1.3, rel=0.01)
    assert worse.base_us == 100.0 and worse.new_us == 130.0


@pytest.mark.parametrize(
    ("factors", "drift", "regressions"),
    [
        ({}, 1.3, ()),  # drift of a whole run cancels
        ({"placement": 1.1}, 1.3, ("EOS placement",)),
        # With the same software, stock modes are the same program: what they differ by is no finding.
        ({"graph-unpartitioned": 1.3}, 1.0, ()),
    ],
)
def test_drift_and_stock_modes_are_no_findings(
    compare: Compare, factors: dict[str, float], drift: float, regressions: tuple[str, ...]
) -> None:
    made = compare(cells(), cells(factors, drift))
    assert (made.regressions, made.exit_code) == (regressions, EXIT_FINDING if regressions else EXIT_OK)
    assert pair(made, "graph-unpartitioned").outcome is made.means["graph-unpartitioned"].outcome is Outcome.CONTROL
    assert pair(made, "placement").outcome is (Outcome.REGRESSION if regressions else Outcome.SAME)
    other = environment(run_id="new", torch="9.9")
    expected = regressions or tuple(f"EOS {mode}" for mode in factors)
    assert compare(cells(), cells(factors, drift), other).regressions == expected


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"torch": "9.9"}, "PyTorch"), ({"driver": "600.1"}, "driver"), ({"packages": {"triton": "9"}}, "package triton")],
)
def test_stock_modes_are_judged_with_other_software(compare: Compare, changes: dict[str, Any], what: str) -> None:
    made = compare(cells(), cells({"graph-unpartitioned": 1.3}), environment(run_id="new", **changes))
    assert made.regressions == ("EOS graph-unpartitioned",)
    assert any(remark.startswith(what) for remark in made.remarks)
    assert what in [each["what"] for each in made.differences]


def test_mean_decides_what_no_row_decides(compare: Compare) -> None:
    """Every workload is 4 % slower, which is within the threshold of a row and beyond half of it."""
    names = ("EOS", "ST", "DNET")
    made = compare(
        [each for name in names for each in cells(workload=name)],
        [each for name in names for each in cells({"placement": 1.04}, workload=name)],
    )
    assert made.regressions == ("placement in the mean",) and made.exit_code == EXIT_FINDING
    assert made.means["placement"].change.count == 3
    assert made.means["placement"].change.value == pytest.approx(1 / 1.04, rel=0.01)


FIRST, SECOND = ({kernel_key("triton_poi_fused_0", (count, 1, 1), (128, 1, 1)): 3} for count in (1, 2))


def test_same_kernels_that_take_longer_are_a_regression(compare: Compare) -> None:
    """The host hides it: the times of iterations are the same."""
    base = with_kernels(cells(), FIRST, placement=50.0)
    made = compare(base, with_kernels(cells(), FIRST, placement=60.0))
    assert made.regressions == ("EOS placement",)
    assert pair(made, "placement").kernel_change == pytest.approx(50 / 60)
    assert "the same kernels take 20% longer" in (pair(made, "placement").reason or "")
    clock = with_kernels(cells(), FIRST, placement=60.0, **dict.fromkeys(STOCK, 48.0))
    assert compare(base, clock).exit_code == EXIT_OK, "all of them do: another clock"
    made = compare(base, with_kernels(cells(), SECOND, placement=60.0))
    assert made.exit_code == EXIT_OK and pair(made, "placement").kernel_change is None, "other kernels"


def test_kernels_tuned_apart_are_compared_by_ratio(compare: Compare) -> None:
    """Every mode of NEW runs kernels that were tuned anew, and is slower by 20 %; placement alone by 20 % more."""
    made = compare(with_kernels(cells(), FIRST), with_kernels(cells({"placement": 1.2}, drift=1.2), SECOND))
    assert made.regressions == ("EOS placement",)


@pytest.mark.parametrize("side", ["BASE", "NEW"])
def test_other_kernels_within_a_run_are_not_decided(compare: Compare, side: str) -> None:
    plain = with_kernels(cells(), FIRST)[1:]
    changed = [*plain[:-1], *with_kernels(cells({"placement": 1.3}), SECOND)[-1:]]
    made = compare(changed, plain) if side == "BASE" else compare(plain, changed)
    left = pair(made, "placement")
    assert (left.outcome, left.change) == (Outcome.UNDECIDED, None)
    assert left.reason == (
        f"other kernels than graph in {side}; other kernels than compile in {side}; eager: not run in both"
    )
    assert "placement" not in made.means and made.exit_code == EXIT_UNDECIDED


def test_row_that_had_not_settled_is_not_decided(compare: Compare) -> None:
    slower = [
        each.model_copy(update={"compile": each.compile.model_copy(update={"settled": False})})
        if each.mode == "placement" and each.compile
        else each
        for each in cells({"placement": 1.5})
    ]
    for sides, reason in (((cells(), slower), "in NEW"), ((slower, cells()), "in BASE"), ((slower, slower), "in both")):
        found = pair(compare(*sides), "placement")
        assert found.outcome is Outcome.UNDECIDED
        assert found.reason == f"not settled when it was timed {reason}"
        assert "1 row has no ratio, because Encore had not settled" in compare(*sides).advice[0]


def test_one_process_on_each_side_decides_nothing(compare: Compare) -> None:
    base, new = ([cell("EOS", "graph", **timed(100)), cell("EOS", "placement", **timed(us))] for us in (100, 110))
    made = compare(base, new)
    assert made.exit_code == EXIT_UNDECIDED and pair(made, "placement").change is None
    assert made.advice == ("1 row has one process in each run: measure with --processes 3.",)


@pytest.mark.parametrize(("noise", "more"), [(0.03, True), (0.1, False)])
def test_wide_intervals_suggest_a_number_of_processes(compare: Compare, noise: float, more: bool) -> None:
    base, new = (
        [cell("EOS", "graph", **timed(1, 1, 1)), cell("EOS", "placement", **timed(*factors))]
        for factors in ([1.0, 1 + noise, 1 - noise], [1 + noise, 1 - noise, 1.0])
    )
    made = compare(base, new)
    found = pair(made, "placement")
    assert made.exit_code == EXIT_UNDECIDED and found.outcome is Outcome.UNDECIDED and found.change is not None
    (advice,) = made.advice
    times = (2 * found.change.half_width() / math.log(1.05)) ** 2
    assert (f"measure both runs with about {times:.1f} times as many processes" in advice) is more
    assert "use a quiet host" in advice


def test_all_differences_of_the_environment_are_named(compare: Compare) -> None:
    cpu = environment().cpu.model_copy(update={"governor": "powersave"})
    other = environment(run_id="new", cpu=cpu, git_commit="f" * 40, settings={"samples": 50}, packages={"numpy": "2"})
    made = compare(cells(), cells(), other)
    found = {each["what"]: (each["base"], each["new"]) for each in made.differences}
    assert found == {
        "commit": (environment().git_commit, "f" * 40),
        "governor": ("performance", "powersave"),
        "setting samples": ("18", "50"),
        "package torch": ("0.0", "none"),
        "package numpy": ("0.0", "2"),
    }
    assert compare(cells(), cells()).differences == []
    (difference,) = compare(cells(), cells(), environment(run_id="new", code="c" * 64)).differences
    assert tuple(difference.values()) == ("code", "unknown", "cccccccccccc")


def test_row_that_fails_now_is_a_regression(compare: Compare) -> None:
    broken = [*cells()[:-1], failed_cell("EOS", "placement", Status.CRASH)]
    made = compare(cells(), broken)
    assert made.regressions == ("EOS placement",)
    assert pair(made, "placement").reason == "passed in BASE, crash in NEW"
    made = compare(broken, cells())
    assert made.regressions == ()
    assert pair(made, "placement").reason == "crash in BASE, pass in NEW"


@pytest.mark.parametrize("field", ["batch", "dtype_policy", "task", "parameters", "input_bytes"])
def test_another_workload_under_the_same_name_is_not_compared(compare: Compare, field: str) -> None:
    other = {"batch": 4, "dtype_policy": "fp32", "task": "training", "parameters": 5, "input_bytes": 1}[field]
    changed = [each.model_copy(update={field: other}) if each.mode == "placement" else each for each in cells()]
    made = compare(cells(), changed)
    left = pair(made, "placement")
    assert left.outcome is Outcome.NOT_COMPARABLE and left.change is None
    assert field.replace("_", " ") in (left.reason or "") and str(other) in (left.reason or "")
    assert pair(made, "graph").change is not None, "the rest is compared"


def test_workloads_and_modes_of_one_run_alone_are_named(compare: Compare) -> None:
    base = [*cells(), cell("ST", "compile"), cell("EOS", "indirection")]
    made = compare(base, [*cells(), cell("EOS (new)", "compile")])
    reasons = {(each.label, each.mode): each.reason for each in made.pairs if each.base_us is None}
    assert reasons == {
        ("ST", "compile"): "only in BASE",
        ("EOS", "indirection"): "only in BASE",
        ("EOS (new)", "compile"): "only in NEW",
    }


def test_runs_of_different_devices_are_refused(compare: Compare) -> None:
    other = environment(run_id="new", gpu=GPU.model_copy(update={"name": "ANOTHER GPU"}))
    with pytest.raises(WrongUse, match=r"measured on SYNTHETIC GPU and .* on ANOTHER GPU"):
        compare(cells(), cells(), other)


def test_runs_without_a_common_row_are_refused_and_described(compare: Compare) -> None:
    with pytest.raises(WrongUse, match=r"no row in common: BASE has EOS in eager, .*, NEW has ST in compile"):
        compare(cells(), [cell("ST", "compile")])
    with pytest.raises(WrongUse, match="NEW has no workload in no mode"):
        compare(cells(), [])


@pytest.mark.parametrize(
    ("factors", "outcome"),
    [
        ([1.25, 1.28, 1.22], Outcome.REGRESSION),
        ([1.05, 1.02, 1.01], Outcome.UNDECIDED),
        ([1.2, 1.06, 1.0], Outcome.UNDECIDED),
    ],
)
def test_ratios_are_compared_by_process(compare: Compare, factors: Sequence[float], outcome: Outcome) -> None:
    """Processes of one mode differ by up to 5 %; what a process has of its own is not counted for each block."""
    stock = cell("EOS", "graph", **timed(1, 1, 1))
    ours, theirs = (cell("EOS", "placement", **timed(*of)) for of in ([1.0, 1.03, 0.98], factors))
    assert pair(compare([stock, ours], [stock, theirs]), "placement").outcome is outcome


def test_shards_of_a_run_are_compared_together(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"{side} {name}", cells(factors, workload=name), environment(run_id=f"{side} {name}"))
        for side, factors in (("base", None), ("new", {"placement": 1.3}))
        for name in ("EOS", "ST")
    ]
    done = run_command(("compare", *(",".join(map(str, names)) for names in (runs[:2], runs[2:]))))
    assert done.returncode == EXIT_FINDING and "EOS placement, ST placement" in done.stdout


def with_kernels(cells: Sequence[Cell], kernels: dict[str, int] | None, **times_us: float) -> list[Cell]:
    """Rows with these kernels, and kernel times by mode."""
    return [
        each.model_copy(update={"metrics": each.metrics.model_copy(update={"kernels": kernels, **more})})
        for each in cells
        if each.metrics
        for more in ([{"kernel_time_us": times_us[each.mode]}] if each.mode in times_us else [{}])
    ]


def test_changed_bits_are_reported(compare: Compare) -> None:
    base = cells()
    correctness = base[-1].correctness
    assert correctness
    changes = {"correctness": correctness.model_copy(update={"digests": ["ff", "ee"]})}
    made = compare(base, [*base[:-1], base[-1].model_copy(update=changes)])
    assert "other bits" in pair(made, "placement").remarks
    assert "other bits" not in pair(made, "graph").remarks


def test_command_exits_with_its_decision(tmp_path: Path) -> None:
    base = str(write_run(tmp_path / "a", [*cells(), cell("ST", "graph")], environment(run_id="a")))
    worse = str(write_run(tmp_path / "b", cells({"placement": 1.3}), environment(run_id="b", driver="600")))
    done = run_command(("compare", base, worse))
    out = done.stdout
    assert done.returncode == EXIT_FINDING
    assert out.index("differs: driver: 580.0 in BASE, 600 in NEW") < out.index("Rows")
    assert "1 regression beyond 5%: EOS placement" in out and "only in BASE" in out
    done = run_command(("compare", base, worse, "--threshold", "0.4"))
    assert done.returncode == EXIT_OK and "no regression beyond 40%" in done.stdout
    wrong: Sequence[Sequence[str]] = (
        *((base, worse, "--threshold", share) for share in ("lots", "5", "nan", "-1")),
        *((base, base), (base, "nowhere"), (base, worse, "--markdown"), (base,)),
    )
    for arguments in wrong:
        assert run_command(("compare", *arguments)).returncode == EXIT_WRONG_USE, arguments
    alone = str(write_run(tmp_path / "c", [cell("EOS", "placement")], environment(run_id="c")))
    done = run_command(("compare", base, alone))
    assert done.returncode == EXIT_UNDECIDED
    assert "--modes compile,graph,MODE" in done.stdout and "nothing can be decided" in done.stdout
