"""`encore compare`: what is worse is found, and what does not go together is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures.synthetic_results import GPU, block, cell, environment, failed_cell, write_run
from noise_simulation import NOISE

from suite import stats
from suite.cli import main
from suite.cli_compare import parse_share
from suite.compare import Comparison, Pair, PairKind, compare_sides, find_side
from suite.errors import WrongUse
from suite.measure.kernels import kernel_key
from suite.report.compare import Kernels, TimeKind
from suite.schema import Cell, Environment, Status
from suite.store import list_runs

STOCK = ("eager", "compile", "graph", "graph-unpartitioned")
SEED = 7


def cells(factors: dict[str, float] | None = None, drift: float = 1.0, workload: str = "EOS") -> list[Cell]:
    """A workload in stock modes and placement; `drift` slows all of them, `factors` single modes."""
    return [
        cell(workload, mode, 100.0 * drift * (factors or {}).get(mode, 1.0), seed=SEED)
        for mode in (*STOCK, "placement")
    ]


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., Comparison]:
    """Writes two runs and compares them."""

    def work(base: Iterable[Cell], new: Iterable[Cell], of: Environment | None = None, **options: Any) -> Comparison:
        write_run(tmp_path / "base", base, environment(run_id="base"))
        write_run(tmp_path / "new", new, of or environment(run_id="new"))
        return compare_sides(find_side(str(tmp_path / "base")), find_side(str(tmp_path / "new")), **options)

    return work


def pair(comparison: Comparison, mode: str, label: str = "EOS") -> Pair:
    (found,) = (each for each in comparison.pairs if (each.label, each.new_mode) == (label, mode))
    return found


def test_a_slower_mode_is_a_regression_and_a_faster_one_is_none(compare: Callable[..., Comparison]) -> None:
    made = compare(cells(), cells({"placement": 1.3}))
    assert [each.new_mode for each in made.regressions] == ["placement"]
    worse = pair(made, "placement")
    assert worse.verdict is stats.Verdict.SLOW
    assert worse.ratio is not None and worse.ratio.value == pytest.approx(1 / 1.3, rel=0.02)
    assert worse.base_us == 100.0 and worse.new_us == 130.0
    made = compare(cells(), cells({"placement": 0.7}))
    assert made.regressions == () and pair(made, "placement").verdict is stats.Verdict.FAST


def test_a_regression_is_beyond_the_threshold(compare: Callable[..., Comparison]) -> None:
    slower = cells({"placement": 1.1})
    assert len(compare(cells(), slower, threshold=0.05).regressions) == 1
    made = compare(cells(), slower, threshold=0.2)
    assert made.regressions == () and pair(made, "placement").verdict is stats.Verdict.SLOW


def test_what_programs_differ_by_that_are_the_same_is_the_floor(compare: Callable[..., Comparison]) -> None:
    """All modes are 8 % slower, those too that Encore has no part in: nothing is said of placement."""
    made = compare(cells(), cells(drift=1.08), threshold=0.01)
    assert made.regressions == ()
    assert pair(made, "placement").floor == pytest.approx(0.08, abs=0.01)
    assert any("4 cells are the same program in both runs" in remark for remark in made.remarks)
    still = compare(cells(), cells({"placement": 1.3}, drift=1.08))
    assert [each.new_mode for each in still.regressions] == ["placement"], "beyond what all of them drifted"


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"torch": "9.9"}, "PyTorch"), ({"driver": "600.1"}, "driver"), ({"packages": {"triton": "9"}}, "package triton")],
)
def test_with_other_software_no_cell_is_the_same_program(
    compare: Callable[..., Comparison], changes: dict[str, Any], what: str
) -> None:
    made = compare(cells(), cells(drift=1.08), environment(run_id="new", **changes), threshold=0.01)
    assert len(made.regressions) == 5, "nothing explains it, so it is said of every mode"
    assert any(f"({what} differ)" in remark for remark in made.remarks)
    assert what in [each.what for each in made.differences]


def test_differences_of_the_environment_come_first_and_all_of_them(compare: Callable[..., Comparison]) -> None:
    cpu = environment().cpu.model_copy(update={"governor": "powersave"})
    other = environment(run_id="new", cpu=cpu, git_commit="f" * 40, settings={"samples": 50}, packages={"numpy": "2"})
    made = compare(cells(), cells(), other)
    found = {each.what: (each.base, each.new) for each in made.differences}
    assert found == {
        "commit": ("0123456789", "ffffffffff"),
        "governor": ("performance", "powersave"),
        "setting samples": ("18", "50"),
        "package torch": ("0.0", "none"),
        "package numpy": ("0.0", "2"),
    }
    assert compare(cells(), cells()).differences == ()
    (difference,) = compare(cells(), cells(), environment(run_id="new", code="c" * 64)).differences
    assert (difference.what, difference.base, difference.new) == ("code", "unknown", "cccccccccccc")


def test_a_cell_that_fails_now_is_a_regression_and_one_that_failed_before_is_not(
    compare: Callable[..., Comparison],
) -> None:
    broken = [*cells()[:-1], failed_cell("EOS", "placement", Status.CRASH)]
    made = compare(cells(), broken)
    (regression,) = made.regressions
    assert (regression.new_mode, regression.reason) == ("placement", "passed in BASE, crash in NEW")
    made = compare(broken, cells())
    assert made.regressions == ()
    assert pair(made, "placement").reason == "crash in BASE, pass in NEW"


@pytest.mark.parametrize("field", ["batch", "dtype_policy", "task", "parameters", "input_bytes"])
def test_another_workload_under_the_same_name_is_not_compared(compare: Callable[..., Comparison], field: str) -> None:
    other = {"batch": 4, "dtype_policy": "fp32", "task": "training", "parameters": 5, "input_bytes": 1}[field]
    changed = [each.model_copy(update={field: other}) if each.mode == "placement" else each for each in cells()]
    made = compare(cells(), changed)
    left = pair(made, "placement")
    assert left.outcome is PairKind.NOT_COMPARABLE and left.ratio is None
    assert field.replace("_", " ") in (left.reason or "") and str(other) in (left.reason or "")
    assert pair(made, "graph").ratio is not None, "the rest is compared"


def test_workloads_and_modes_of_one_run_alone_are_named(compare: Callable[..., Comparison]) -> None:
    base = [*cells(), cell("ST", "compile"), cell("EOS", "indirection")]
    made = compare(base, [*cells(), cell("EOS (new)", "compile")])
    reasons = {(each.label, each.new_mode): each.reason for each in made.pairs if each.ratio is None}
    assert reasons == {
        ("ST", "compile"): "only in BASE",
        ("EOS", "indirection"): "only in BASE",
        ("EOS (new)", "compile"): "only in NEW",
    }


def test_a_half_finished_run_is_said_to_be_one(compare: Callable[..., Comparison]) -> None:
    plan = {"workloads": ["EOS", "ST"], "modes": ["compile", "placement"]}
    made = compare(
        [*cells(), cell("ST", "compile")], cells(), environment(run_id="new", settings={"samples": 18, **plan})
    )
    assert "NEW is not finished; not run yet: ST in compile, placement" in made.remarks
    assert pair(made, "compile", "ST").reason == "only in BASE, not run yet in the other"


def test_a_line_cut_short_is_said_to_be_one(tmp_path: Path) -> None:
    base = write_run(tmp_path / "a", cells(), environment(run_id="a"))
    new = write_run(tmp_path / "b", cells(), environment(run_id="b"))
    whole = (new / "cells.jsonl").read_bytes()
    (new / "cells.jsonl").write_bytes(whole[:-40])
    made = compare_sides(find_side(str(base)), find_side(str(new)))
    assert any(remark.startswith("NEW: ") and "cut" in remark for remark in made.remarks), made.remarks
    assert pair(made, "placement").reason == "only in BASE"


def test_a_smoke_run_is_said_to_be_one(compare: Callable[..., Comparison]) -> None:
    tiny = [each.model_copy(update={"size": "tiny"}) for each in cells()]
    made = compare(tiny, tiny)
    assert next(remark for remark in made.remarks if "SMOKE RUN" in remark).startswith("BASE is a SMOKE RUN in tiny")


def test_runs_of_different_devices_are_refused(compare: Callable[..., Comparison]) -> None:
    other = environment(run_id="new", gpu=GPU.model_copy(update={"name": "ANOTHER GPU"}))
    with pytest.raises(WrongUse, match=r"measured on SYNTHETIC GPU and .* on ANOTHER GPU"):
        compare(cells(), cells(), other)


def test_runs_without_a_cell_in_common_are_refused_and_both_are_described(compare: Callable[..., Comparison]) -> None:
    with pytest.raises(WrongUse, match=r"no cell in common: BASE has EOS in eager, .*, NEW has ST in compile"):
        compare(cells(), [cell("ST", "compile")])
    with pytest.raises(WrongUse, match="NEW has no workload in no mode"):
        compare(cells(), [])


def test_two_modes_of_one_run_are_paired_block_by_block(tmp_path: Path) -> None:
    """The machine slows down by half over the run, for both modes alike; that cancels."""

    def blocks(factor: float) -> list[Any]:
        return [block(k, [factor * (100 + 10 * k) + extra for extra in (0.0, 0.1, 0.2)], k) for k in range(6)]

    run = write_run(
        tmp_path / "run", [cell("EOS", "graph", blocks=blocks(1)), cell("EOS", "placement", blocks=blocks(0.8))]
    )
    made = compare_sides(find_side(f"{run}:graph"), find_side(f"{run}:placement"))
    (found,) = made.pairs
    assert (found.base_mode, found.new_mode) == ("graph", "placement")
    assert found.ratio is not None and found.ratio.value == pytest.approx(1.25, rel=0.01)
    assert found.ratio.high - found.ratio.low < 0.02
    assert made.differences == ()
    apart = [
        cell("EOS", "graph", blocks=blocks(1), grouping="sequential"),
        cell("EOS", "placement", blocks=blocks(0.8)),
    ]
    run = write_run(tmp_path / "apart", apart)
    (found,) = compare_sides(find_side(f"{run}:graph"), find_side(f"{run}:placement")).pairs
    assert found.ratio is not None and found.ratio.high - found.ratio.low > 0.1, "they did not alternate"


def processes(factors: Sequence[float], blocks: int = 12) -> list[Any]:
    """Blocks of as many processes as factors: those of one process agree to a tenth of a percent."""
    return [
        block(k, [100 * factor * (1 + 0.0005 * (k % 3))] * 2, k).model_copy(update={"process": process})
        for process, factor in enumerate(factors)
        for k in range(blocks)
    ]


def test_what_a_process_has_of_its_own_is_not_counted_once_for_each_block(tmp_path: Path) -> None:
    """Two modes of the same speed, whose processes differ by 3 %: the run's report says that nothing is known."""
    ours, theirs = processes([1.0, 1.03, 0.98]), processes([1.05, 1.02, 1.01])
    run = write_run(tmp_path / "run", [cell("EOS", "graph", blocks=ours), cell("EOS", "placement", blocks=theirs)])
    (found,) = compare_sides(find_side(f"{run}:graph"), find_side(f"{run}:placement")).pairs
    assert found.ratio is not None and found.ratio.value == pytest.approx(0.976, abs=0.002)
    assert found.verdict is stats.Verdict.AMBG
    theirs = processes([1.25, 1.28, 1.22])
    run = write_run(tmp_path / "slow", [cell("EOS", "graph", blocks=ours), cell("EOS", "placement", blocks=theirs)])
    (found,) = compare_sides(find_side(f"{run}:graph"), find_side(f"{run}:placement")).pairs
    assert (found.verdict, found.outcome) == (stats.Verdict.SLOW, PairKind.REGRESSION)


def test_the_order_of_two_modes_is_of_no_consequence(tmp_path: Path) -> None:
    """A baseline that ran again beside the second half of the modes is paired there, whichever is named first."""
    first, second = ["compile", "graph"], ["graph", "encore"]
    slow, again, fast = processes([1.5, 1.52, 1.49]), processes([1.0, 1.02, 0.99]), processes([0.8, 0.82, 0.79])
    rows = [
        cell("EOS", "graph", blocks=slow, grouping="halves").model_copy(update={"group": first}),
        cell("EOS", "encore", blocks=fast, grouping="halves").model_copy(
            update={"group": second, "baseline_blocks": {"graph": again}}
        ),
    ]
    run = write_run(tmp_path / "run", rows)
    sides = [find_side(f"{run}:{mode}") for mode in ("graph", "encore")]
    (forth,), (back,) = compare_sides(*sides).pairs, compare_sides(*reversed(sides)).pairs
    assert forth.ratio is not None and forth.ratio.value == pytest.approx(1.25, rel=0.01)
    assert back.ratio is not None and back.ratio.value == pytest.approx(1 / forth.ratio.value)
    assert (back.ratio.low, back.ratio.high) == pytest.approx((1 / forth.ratio.high, 1 / forth.ratio.low))
    assert (forth.verdict, back.verdict) == (stats.Verdict.FAST, stats.Verdict.SLOW)
    assert forth.floor == back.floor


def test_a_mean_is_over_workloads_of_one_process_and_of_several(tmp_path: Path) -> None:
    rows = [
        cell(workload, mode, blocks=processes([factor] * count))
        for workload, count in (("EOS", 3), ("ALNET", 1))
        for mode, factor in (("graph", 1.0), ("placement", 0.8))
    ]
    run = write_run(tmp_path / "run", rows)
    made = compare_sides(find_side(f"{run}:graph"), find_side(f"{run}:placement"))
    assert made.geomeans["graph to placement"].value == pytest.approx(1.25, rel=0.01)
    assert made.geomeans["graph to placement"].count == 2


def test_single_processes_of_two_modes_have_no_verdict(tmp_path: Path) -> None:
    modes = [cell("EOS", "graph", blocks=processes([1.0])), cell("EOS", "placement", blocks=processes([1.1]))]
    run = write_run(tmp_path / "run", modes)
    (found,) = compare_sides(find_side(f"{run}:graph"), find_side(f"{run}:placement")).pairs
    assert found.ratio is not None and found.verdict is stats.Verdict.AMBG


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "AMBG"), (1.04, "AMBG"), (1.1, "SLOW")])
def test_single_processes_of_two_runs_may_differ_as_processes_do(
    compare: Callable[..., Comparison], factor: float, verdict: str
) -> None:
    base, new = ([cell("EOS", "placement", blocks=processes([each]))] for each in (1.0, factor))
    assert pair(compare(base, new), "placement").verdict == verdict
    three = [[cell("EOS", "placement", blocks=processes([each] * 3))] for each in (1.0, factor)]
    assert pair(compare(*three), "placement").verdict == {1.0: "SAME", 1.04: "SLOW", 1.1: "SLOW"}[factor]


def test_a_mode_of_one_run_is_compared_with_one_of_another(tmp_path: Path) -> None:
    base = write_run(tmp_path / "a", cells(), environment(run_id="a"))
    new = write_run(tmp_path / "b", cells({"placement": 0.5}), environment(run_id="b"))
    made = compare_sides(find_side(f"{base}:graph"), find_side(f"{new}:placement"))
    assert made.pairs[0].ratio is not None and made.pairs[0].ratio.value == pytest.approx(2, rel=0.02)
    assert list(made.geomeans) == ["graph to placement"]


def test_wrong_sides_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", cells())
    with pytest.raises(WrongUse, match="has no mode 'grap'; it has graph"):
        find_side(f"{run}:grap")
    with pytest.raises(WrongUse, match="unknown run"):
        find_side("nowhere:graph")
    with pytest.raises(WrongUse, match="are the same"):
        compare_sides(find_side(str(run)), find_side(str(run)))
    with pytest.raises(WrongUse, match=r"names a mode and .* does not"):
        compare_sides(find_side(f"{run}:graph"), find_side(str(run)))


def test_throughput_is_compared_when_asked_for(compare: Callable[..., Comparison]) -> None:
    faster = [
        each.model_copy(update={"blocks": [b.model_copy(update={"throughput_us": 45.0}) for b in each.blocks]})
        for each in cells()
    ]
    by_latency = pair(compare(cells(), faster), "graph").ratio
    assert by_latency is not None and by_latency.value == 1
    made = compare(cells(), faster, metric=TimeKind.THROUGHPUT)
    assert pair(made, "graph").ratio is not None and pair(made, "graph").ratio.value == pytest.approx(2, rel=0.01)
    silent = [
        each.model_copy(update={"blocks": [b.model_copy(update={"throughput_us": None}) for b in each.blocks]})
        for each in cells()
    ]
    made = compare(cells(), silent, metric=TimeKind.THROUGHPUT)
    assert {each.reason for each in made.pairs} == {"no throughput samples"}


def test_means_are_those_of_the_ratios_with_their_interval(compare: Callable[..., Comparison]) -> None:
    base = [*cells(), *cells(workload="ST")]
    made = compare(base, [*cells({"placement": 0.5}), *cells({"placement": 2.0}, workload="ST")])
    mean = made.geomeans["placement"]
    assert mean.value == pytest.approx(1.0, rel=0.01) and mean.low < mean.value < mean.high and mean.count == 2


def with_kernels(cells: Sequence[Cell], kernels: dict[str, int] | None) -> list[Cell]:
    return [
        each.model_copy(update={"metrics": each.metrics.model_copy(update={"kernels": kernels})})
        for each in cells
        if each.metrics
    ]


def test_a_ratio_of_two_tunings_is_no_regression_and_in_no_mean(compare: Callable[..., Comparison]) -> None:
    """The same slow-down, with the kernels launched alike and launched otherwise."""
    kernel, retuned = (
        kernel_key("triton_poi_fused_0", (1, 1, 1), (128, 1, 1)),
        kernel_key("triton_poi_fused_0", (2, 1, 1), (64, 1, 1)),
    )
    made = compare(with_kernels(cells(), {kernel: 3}), with_kernels(cells({"placement": 1.3}), {kernel: 3}))
    assert [each.new_mode for each in made.regressions] == ["placement"]
    changed = [*with_kernels(cells(), {kernel: 3})[:-1], *with_kernels(cells({"placement": 1.3}), {retuned: 3})[-1:]]
    made = compare(with_kernels(cells(), {kernel: 3}), changed)
    assert pair(made, "placement").kernels is Kernels.RETUNED
    assert made.regressions == () and "placement" not in made.geomeans and "graph" in made.geomeans
    assert pair(made, "placement").outcome is PairKind.OTHER_KERNELS and pair(made, "placement").verdict is None


def test_other_bits_are_remarked(compare: Callable[..., Comparison]) -> None:
    base = cells()
    correctness = base[-1].correctness
    assert correctness
    changes = {"correctness": correctness.model_copy(update={"digests": ["ff", "ee"]})}
    made = compare(base, [*base[:-1], base[-1].model_copy(update=changes)])
    assert "other bits" in pair(made, "placement").remarks
    assert "other bits" not in pair(made, "graph").remarks


def encore(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arguments])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_the_command_exits_with_0_1_or_2_in_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = str(write_run(tmp_path / "a", [*cells(), cell("ST", "graph")], environment(run_id="a")))
    worse = str(write_run(tmp_path / "b", cells({"placement": 1.3}), environment(run_id="b", driver="600")))
    code, out, _ = encore(capsys, base, worse)
    assert code == 1
    assert out.index("differs: driver: 580.0 in BASE, 600 in NEW") < out.index("Cells")
    assert "1 regression beyond 5%" in out and "only in BASE" in out
    code, out, _ = encore(capsys, base, worse, "--markdown")
    assert code == 1
    assert out.index("| driver | 580.0 | 600 |") < out.index("## Cells") < out.index("## Not comparable")
    assert "SLOW, regression" in out
    code, out, _ = encore(capsys, base, worse, "--json", "--threshold", "40%")
    assert code == 0

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    read = json.loads(out, parse_constant=no_constant)
    assert read["threshold"] == 0.4 and read["regressions"] == []
    assert {"workload": "ST", "outcome": "not comparable", "reason": "only in BASE"}.items() <= read["cells"][
        -1
    ].items()
    wrong: Sequence[Sequence[str]] = (
        (base, base), (base, "nowhere"), (base, worse, "--threshold", "lots"), (base, worse, "--json", "--markdown"),
        (base,),
    )  # fmt: skip
    for arguments in wrong:
        assert encore(capsys, *arguments)[0] == 2, arguments


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("12.5 %", 0.125), ("0", 0.0)])
def test_a_threshold_is_a_share_or_percent(text: str, share: float) -> None:
    assert parse_share(text, "--threshold") == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "5", "100%", "-5%", "nan", "1e-3", "\N{ARABIC-INDIC DIGIT FIVE}%"])
def test_a_threshold_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(WrongUse, match="--threshold"):
        parse_share(text, "--threshold")


def test_recorded_runs_stay_comparable() -> None:
    runs = list_runs(NOISE)
    assert len(runs) >= 3
    made = compare_sides(find_side(str(runs[0])), find_side(str(runs[1])))
    assert sum(1 for each in made.pairs if each.ratio is not None) >= 10
    assert [each.what for each in made.differences] == ["commit"]
