"""The sentence at the top of a report, and what it is worth."""

from __future__ import annotations

import pytest
from fixtures.synthetic_results import cell, environment, explanation, failed_cell, metrics

from suite.report import compare, conclusion
from suite.report.conclusion import Trust
from suite.report.published import load_published
from suite.report.runs import Run, Superseded
from suite.results.schema import Block, Cell, GpuState, Shortage, Status

PUBLISHED = load_published()
KERNELS = {"triton_poi_fused_0 grid 4 block 128": 1}


def measured(workload, mode, host_us, **changes):
    """A cell whose kernels are known, and the same in every mode."""
    return cell(workload, mode, host_us, metrics=metrics().model_copy(update={"kernels": KERNELS}), **changes)


def concluded(*cells: Cell, **changes) -> conclusion.Conclusion:
    run = Run(changes.pop("of", environment(git_dirty=False)), tuple(cells), **changes)
    return conclusion.of_run(compare.Ratios(run), PUBLISHED)


def pair(workload, graph_us, indirection_us, **changes):
    return [
        measured(workload, "compile", 2 * graph_us),
        measured(workload, "graph", graph_us),
        measured(workload, "indirection", indirection_us, **changes),
    ]


def text_of(point_words, result):
    return next((point for point in result.points if point_words in point.text), None)


def test_sentence_has_mean_interval_and_verdicts():
    result = concluded(*pair("EOS", 100.0, 50.0), *pair("ST", 50.0, 100.0), *pair("MMC", 100.0, 12.5))
    assert result.sentence.startswith("Encore (indirection) is 2.0")
    assert "times as fast as stock CUDA graphs over 3 of GraCE's 25 workloads (geometric mean 2.0" in result.sentence
    assert result.sentence.endswith("faster in 2, slower in 1.")
    assert result.trust is Trust.YES
    assert result.baseline == "graph"


def test_encore_is_known_by_its_backend_next_to_steps():
    steps = [measured("EOS", "step", 25.0), measured("EOS", "callables", 40.0)]
    assert concluded(*pair("EOS", 100.0, 50.0), *steps).sentence.startswith("Encore (indirection) is ")
    assert concluded(measured("EOS", "graph", 100.0), *steps).sentence.startswith("Encore (callables) is ")


def test_sentence_calls_a_mean_around_one_about_as_fast():
    result = concluded(*pair("EOS", 100.0, 100.0))
    assert result.sentence.startswith(
        "Encore (indirection) is about as fast as stock CUDA graphs over 1 of GraCE's 25 workloads ("
    )


def test_tensor_parallel_rows_are_in_no_mean():
    """They are in no mean: a missing mean says nothing about kernels then."""
    split = [one.model_copy(update={"tp": 2}) for one in pair("XLNET-I@tp2", 50.0, 100.0)]
    assert concluded(*split).sentence == (
        "No mean tells whether Encore (indirection) is faster than stock CUDA graphs: all rows are of workloads split "
        "over GPUs."
    )
    both = concluded(*pair("EOS", 100.0, 50.0), *split)
    assert "over 1 of GraCE's 25 workloads " in both.sentence and both.sentence.endswith("faster in 1.")


def test_sentence_is_about_the_first_group_of_rows():
    """Means and figures are of one group: GraCE's workloads, if there are any."""
    result = concluded(*pair("EOS", 100.0, 50.0), *pair("MINE", 100.0, 10.0))
    assert "is 2.0" in result.sentence and "over 1 of GraCE's 25 workloads " in result.sentence
    assert "over 1 workload " in concluded(*pair("MINE", 100.0, 10.0)).sentence


def test_unsettled_rows_have_no_verdict_and_are_in_no_mean():
    compiled = measured("EOS", "indirection", 50.0).compile
    assert compiled is not None
    unsettled = compiled.model_copy(update={"settled": False})
    result = concluded(*pair("EOS", 100.0, 50.0, compile=unsettled), *pair("ST", 100.0, 100.0))
    assert "over 1 of GraCE's 25 workloads " in result.sentence
    assert result.sentence.endswith("the same in 1; 1 more cannot be compared.")


def test_without_any_ratio_nothing_is_said_of_kernels():
    cells = pair("EOS", 100.0, 50.0)
    result = concluded(*cells[:2], failed_cell("EOS", "indirection", Status.CRASH))
    assert text_of("There is no ratio", result) is not None and text_of("0 of 0 ratios", result) is None
    assert result.trust is Trust.NO and result.sentence.endswith("1 of 1 workloads have no result.")


def test_sentence_of_other_kernels_says_nothing_of_speed():
    other = metrics().model_copy(update={"kernels": {"triton_poi_fused_0 grid 4 block 256": 1}})
    cells = [measured("EOS", "compile", 200.0), measured("EOS", "graph", 100.0), cell("EOS", "indirection", 50.0)]
    for last in (cells[-1], cells[-1].model_copy(update={"metrics": other})):
        result = concluded(*cells[:-1], last)
        assert result.sentence == (
            "It cannot be told whether Encore (indirection) is faster than stock CUDA graphs: in 1 of 1 workloads the "
            "two may have run other kernels, or had not settled."
        )
        assert result.trust is Trust.NO


def test_a_failed_cell_is_counted_and_leaves_reservations():
    result = concluded(
        *pair("EOS", 100.0, 50.0),
        measured("ST", "compile", 10.0),
        measured("ST", "graph", 10.0),
        failed_cell("ST", "indirection", Status.FAIL_ACCURACY),
    )
    assert result.sentence.endswith("faster in 1; 1 more cannot be compared.")
    assert result.trust is Trust.PARTLY
    assert text_of("5 cells passed, 1 failed, 0 were not run", result).holds is False
    assert text_of("cells agree", result).holds is False


def test_a_smoke_run_cannot_be_trusted():
    result = concluded(*(one.model_copy(update={"device": "cpu"}) for one in pair("EOS", 100.0, 50.0)))
    assert result.trust is Trust.NO
    assert text_of("SMOKE RUN", result) is not None


def throttled(one: Cell) -> Cell:
    state = GpuState(
        sm_clock_mhz=1000, memory_clock_mhz=2619, power_w=700.0, temperature_c=80, throttle_reasons=["SwPowerCap"]
    )
    blocks: list[Block] = [block.model_copy(update={"gpu_after": state}) for block in one.blocks]
    return one.model_copy(update={"blocks": blocks})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"of": environment(git_dirty=True)}, "not committed when it was measured"),
        ({"of": environment(git_commit=None, git_dirty=False)}, "of which one is unknown"),
        ({"remarks": ("the last line of run x was cut short",)}, "The last line of run x was cut short"),
        ({"missing": (("ST", "graph"),)}, "1 were not run"),
        (
            {"superseded": (Superseded(failed_cell("EOS", "graph", Status.OOM), "old", None),)},
            "1 cell had failed before",
        ),
    ],
)
def test_what_speaks_against_a_result_is_said(change, words):
    result = concluded(*pair("EOS", 100.0, 50.0), **change)
    assert result.trust is Trust.PARTLY
    assert text_of(words, result).holds is False


def test_a_gpu_that_slowed_down_is_said():
    first, *rest = pair("EOS", 100.0, 50.0)
    result = concluded(throttled(first), *rest)
    assert text_of("The GPU lowered its clocks while it was measured", result).holds is False


def test_memory_that_was_short_behind_samples_is_said():
    short = [Shortage(mode="indirection", process=1, phase="prepare", error="no memory")]
    result = concluded(*pair("EOS", 100.0, 50.0, shortages=short))
    assert text_of("Memory was short in 1 cell behind samples, which stand", result).holds is False
    assert text_of("Memory was short", concluded(*pair("EOS", 100.0, 50.0))) is None


def test_analyses_count_models_that_stock_captures_whole():
    one, other = explanation("EOS"), explanation("ST")
    result = conclusion.of_explanations((one, other, explanation("MMC", graphs=[], error="died")))
    assert result.sentence.startswith("Of 3 models, stock CUDA graphs would hold all kernels of ")
    assert text_of("2 of 3 analyses came to their end", result).holds is False
    assert result.baseline is None


@pytest.mark.parametrize(("found", "holds"), [(0, True), (1, True), (2, False)])
def test_findings_between_equal_programs_are_counted(monkeypatch, found, holds):
    pairs = [object()] * 20
    monkeypatch.setattr(conclusion, "same_program_pairs", lambda run: pairs)
    monkeypatch.setattr(conclusion, "false_findings", lambda given: given[:found])
    result = concluded(*pair("EOS", 100.0, 50.0))
    point = text_of(f"Of 20 comparisons of modes that are the same program, {found} found a difference", result)
    assert point.holds is holds


A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("codes", "dirty", "text", "holds"),
    [
        ((A, A), (False, True), "All rows are of one version of the code", True),
        ((A, A), (True, True), "All rows are of one version of the code, not committed when it was measured", False),
        ((A, B), (False, False), "The rows are of 2 versions", False),
        ((A, B), (False, True), "The rows are of 2 versions, not committed when it was measured", False),
        ((A, None), (False, False), "The rows are of 2 versions", False),
    ],
)
def test_rows_of_the_same_code_are_of_one_version(codes, dirty, text, holds):
    parts = tuple(
        Run(environment(run_id=name, git_commit=name * 40, git_dirty=changed, code=code), tuple(pair(row, 100.0, 90.0)))
        for name, row, changed, code in zip(("1", "2"), ("EOS", "ST"), dirty, codes, strict=True)
    )
    result = concluded(*parts[0].cells, *parts[1].cells, of=parts[1].environment, parts=parts)
    point = text_of(text, result)
    assert (point.text, point.holds) == (text, holds)


@pytest.mark.parametrize(("rows", "text"), [(["EOS"], "All rows are of one version"), (["EOS", "ST"], "of 2 versions")])
def test_commits_are_those_of_runs_that_have_rows(rows, text):
    of = [environment(run_id=name, git_commit=digit * 40, git_dirty=False) for name, digit in (("a", "1"), ("b", "2"))]
    old = Run(of[0], tuple(cell for name in rows[1:] for cell in pair(name, 100.0, 90.0)))
    new = Run(of[1], tuple(pair(rows[0], 100.0, 90.0)))
    assert text_of(text, concluded(*new.cells, *old.cells, of=of[1], parts=(old, new)))
