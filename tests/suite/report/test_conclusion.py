"""The sentence at the top of a report."""

from __future__ import annotations

import pytest
from fixtures.synthetic_results import cell, failed_cell, metrics

from suite.report import compare, conclusion
from suite.report.published import load_published
from suite.results.schema import Cell, Status

PUBLISHED = load_published()
KERNELS = {"triton_poi_fused_0 grid 4 block 128": 1}


def measured(workload, mode, host_us, **changes):
    """A cell whose kernels are known, and the same in every mode."""
    return cell(workload, mode, host_us, metrics=metrics().model_copy(update={"kernels": KERNELS}), **changes)


def pair(workload, graph_us, indirection_us, **changes):
    return [
        measured(workload, "compile", 2 * graph_us),
        measured(workload, "graph", graph_us),
        measured(workload, "indirection", indirection_us, **changes),
    ]


def split(*cells: Cell) -> list[Cell]:
    return [one.model_copy(update={"tp": 2}) for one in cells]


def unsettled(rows: list[Cell]) -> list[Cell]:
    assert rows[-1].compile is not None
    changes = {"compile": rows[-1].compile.model_copy(update={"settled": False})}
    return [*rows[:-1], rows[-1].model_copy(update=changes)]


OTHER_KERNELS = metrics().model_copy(update={"kernels": {"triton_poi_fused_0 grid 4 block 256": 1}})
STEPS = [measured("EOS", "step", 25.0), measured("EOS", "callables", 40.0)]
EOS = pair("EOS", 100.0, 50.0)
UNTOLD = "It cannot be told whether Encore (indirection) is faster than stock CUDA graphs: of 1 workloads "
OF = "over 1 of GraCE's 25 workloads ("


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (
            [*EOS, *pair("ST", 50.0, 100.0), *pair("MMC", 100.0, 12.5)],
            [
                "Encore (indirection) is 2.0",
                "times as fast as stock CUDA graphs over 3 of GraCE's 25 workloads (geometric mean 2.0",
                "faster in 2, slower in 1.",
            ],
        ),
        # Encore is known by its backend, next to steps too.
        ([*EOS, *STEPS], ["Encore (indirection) is ", OF, "faster in 1."]),
        ([measured("EOS", "graph", 100.0), *STEPS], ["Encore (callables) is ", OF, "faster in 1."]),
        (pair("EOS", 100.0, 100.0), [f"Encore (indirection) is about as fast as stock CUDA graphs {OF}", "."]),
        # Rows over several GPUs are in no mean: a missing mean says nothing about kernels then.
        (
            split(*pair("XLNET-I@tp2", 50.0, 100.0)),
            [
                "No mean tells whether Encore (indirection) is faster than stock CUDA graphs: "
                "all rows are of workloads split over GPUs."
            ],
        ),
        ([*EOS, *split(*pair("XLNET-I@tp2", 50.0, 100.0))], ["Encore", OF, "faster in 1."]),
        # Means and figures are of one group: GraCE's workloads, if there are any.
        ([*EOS, *pair("MINE", 100.0, 10.0)], ["Encore (indirection) is 2.0", OF, "faster in 1."]),
        (pair("MINE", 100.0, 10.0), ["Encore (indirection) is 10.0", "over 1 workload (", "faster in 1."]),
        # An unsettled row has no verdict and is in no mean.
        (
            [*unsettled(EOS), *pair("ST", 100.0, 100.0)],
            ["Encore", OF, "the same in 1; 1 more cannot be compared."],
        ),
        (
            [*EOS[:2], failed_cell("EOS", "indirection", Status.CRASH)],
            [UNTOLD, "1 have no result, and in 0 the two may have run other kernels, or had not settled."],
        ),
        *(
            (
                [*EOS[:2], cell("EOS", "indirection", 50.0, metrics=found)],
                [UNTOLD, "0 have no result, and in 1 the two may have run other kernels, or had not settled."],
            )
            for found in (metrics(), OTHER_KERNELS)
        ),
        (
            [*EOS, *pair("ST", 10.0, 10.0)[:2], failed_cell("ST", "indirection", Status.FAIL_ACCURACY)],
            ["Encore", "faster in 1; 1 more cannot be compared."],
        ),
    ],
)
def test_sentence_is_of_the_rows_that_can_be_compared(cells: list[Cell], words: list[str]) -> None:
    said = conclusion.of_run(compare.Ratios(tuple(cells)), PUBLISHED)
    assert said.startswith(words[0]) and said.endswith(words[-1]) and all(each in said for each in words), said
