"""The sentence at the top of a report."""

from __future__ import annotations

from fixtures.synthetic_results import cell, environment, failed_cell, metrics

from suite.report import compare, conclusion
from suite.report.published import load_published
from suite.report.runs import Run
from suite.results.schema import Cell, Status

PUBLISHED = load_published()
KERNELS = {"triton_poi_fused_0 grid 4 block 128": 1}


def measured(workload, mode, host_us, **changes):
    """A cell whose kernels are known, and the same in every mode."""
    return cell(workload, mode, host_us, metrics=metrics().model_copy(update={"kernels": KERNELS}), **changes)


def concluded(*cells: Cell, **changes) -> str:
    run = Run(changes.pop("of", environment(git_dirty=False)), tuple(cells), **changes)
    return conclusion.of_run(compare.Ratios(run.cells), PUBLISHED)


def pair(workload, graph_us, indirection_us, **changes):
    return [
        measured(workload, "compile", 2 * graph_us),
        measured(workload, "graph", graph_us),
        measured(workload, "indirection", indirection_us, **changes),
    ]


def test_sentence_has_mean_interval_and_verdicts():
    result = concluded(*pair("EOS", 100.0, 50.0), *pair("ST", 50.0, 100.0), *pair("MMC", 100.0, 12.5))
    assert result.startswith("Encore (indirection) is 2.0")
    assert "times as fast as stock CUDA graphs over 3 of GraCE's 25 workloads (geometric mean 2.0" in result
    assert result.endswith("faster in 2, slower in 1.")


def test_encore_is_known_by_its_backend_next_to_steps():
    steps = [measured("EOS", "step", 25.0), measured("EOS", "callables", 40.0)]
    assert concluded(*pair("EOS", 100.0, 50.0), *steps).startswith("Encore (indirection) is ")
    assert concluded(measured("EOS", "graph", 100.0), *steps).startswith("Encore (callables) is ")


def test_sentence_calls_a_mean_around_one_about_as_fast():
    result = concluded(*pair("EOS", 100.0, 100.0))
    assert result.startswith(
        "Encore (indirection) is about as fast as stock CUDA graphs over 1 of GraCE's 25 workloads ("
    )


def test_tensor_parallel_rows_are_in_no_mean():
    """They are in no mean: a missing mean says nothing about kernels then."""
    split = [one.model_copy(update={"tp": 2}) for one in pair("XLNET-I@tp2", 50.0, 100.0)]
    assert concluded(*split) == (
        "No mean tells whether Encore (indirection) is faster than stock CUDA graphs: all rows are of workloads split "
        "over GPUs."
    )
    both = concluded(*pair("EOS", 100.0, 50.0), *split)
    assert "over 1 of GraCE's 25 workloads " in both and both.endswith("faster in 1.")


def test_sentence_is_about_the_first_group_of_rows():
    """Means and figures are of one group: GraCE's workloads, if there are any."""
    result = concluded(*pair("EOS", 100.0, 50.0), *pair("MINE", 100.0, 10.0))
    assert "is 2.0" in result and "over 1 of GraCE's 25 workloads " in result
    assert "over 1 workload " in concluded(*pair("MINE", 100.0, 10.0))


def test_unsettled_rows_have_no_verdict_and_are_in_no_mean():
    compiled = measured("EOS", "indirection", 50.0).compile
    assert compiled is not None
    unsettled = compiled.model_copy(update={"settled": False})
    result = concluded(*pair("EOS", 100.0, 50.0, compile=unsettled), *pair("ST", 100.0, 100.0))
    assert "over 1 of GraCE's 25 workloads " in result
    assert result.endswith("the same in 1; 1 more cannot be compared.")


def test_sentence_without_any_ratio_counts_failures():
    cells = pair("EOS", 100.0, 50.0)
    result = concluded(*cells[:2], failed_cell("EOS", "indirection", Status.CRASH))
    assert ": of 1 workloads 1 have no result, and in 0 " in result


def test_sentence_of_other_kernels_states_no_speed():
    other = metrics().model_copy(update={"kernels": {"triton_poi_fused_0 grid 4 block 256": 1}})
    cells = [measured("EOS", "compile", 200.0), measured("EOS", "graph", 100.0), cell("EOS", "indirection", 50.0)]
    for last in (cells[-1], cells[-1].model_copy(update={"metrics": other})):
        result = concluded(*cells[:-1], last)
        assert result == (
            "It cannot be told whether Encore (indirection) is faster than stock CUDA graphs: of 1 workloads 0 have no "
            "result, and in 1 the two may have run other kernels, or had not settled."
        )


def test_failed_cell_is_counted_as_not_compared():
    result = concluded(
        *pair("EOS", 100.0, 50.0),
        measured("ST", "compile", 10.0),
        measured("ST", "graph", 10.0),
        failed_cell("ST", "indirection", Status.FAIL_ACCURACY),
    )
    assert result.endswith("faster in 1; 1 more cannot be compared.")
