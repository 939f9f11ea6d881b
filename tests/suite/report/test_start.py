"""A program's start: sums of its first calls, when Encore has paid for itself, and the table of both."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from fixtures.synthetic_results import block, cell

from suite.report.compare import Ratios
from suite.report.start import NEVER, Start, start_table
from suite.results.schema import CompileConditions, CompileTimes


def walked(ours: Start, theirs: Start, most: int) -> int | None:
    """Return the call from which on our sum is no larger, found by trying `most` calls."""
    above = [n for n in range(1, most + 1) if ours.sum_s(n) > theirs.sum_s(n) + 1e-9]
    return None if above and above[-1] == most else (above[-1] if above else 0) + 1


STARTS = [Start((5.0, 1.0, 0.5), 0.1), Start((3.0,), 0.2), Start((1.0, 1.0, 1.0, 9.0), 0.125), Start((2.0, 0.3), 0.3)]


@pytest.mark.parametrize(("ours", "theirs"), itertools.product(STARTS, repeat=2))
def test_pays_after_is_what_walking_finds(ours: Start, theirs: Start) -> None:
    assert ours.pays_after(theirs) == walked(ours, theirs, 500)
    assert [Start((4.0, 1.0), 0.5).sum_s(calls) for calls in (1, 2, 4)] == [4.0, 5.0, 6.0], "calls after them settled"


def measured(mode: str, calls_s: tuple[float, ...], steady_us: float, **more: Any) -> Any:
    fields = {
        "first_call_s": calls_s[0], "warm_up_s": sum(calls_s[:2]), "warm_cache": False, "parts": {},
        "conditions": CompileConditions.KERNELS_ALONE, "settle_calls": len(calls_s) - 2, "settled": True,
        "warm_up_calls": 2, "settle_s": sum(calls_s[2:]), "calls_s": calls_s,
    }  # fmt: skip
    return cell("EOS", mode, blocks=[block(0, [steady_us])], compile=CompileTimes(**fields | more))


def rows(*cells: Any) -> dict[str, dict[str, Any]]:
    found = start_table(Ratios(tuple(cells))).frame.to_dict("records")
    return {row["mode"]: row for row in found}


def test_table_compares_starts_with_compile_and_graph() -> None:
    found = rows(
        measured("compile", (10.0, 0.1), 100_000.0),
        measured("graph", (10.0, 1.0), 80_000.0),
        measured("encore", (10.0, 1.0, 1.0), 50_000.0),
    )
    ours = found["encore"]
    assert (ours["settled_after_calls"], ours["settled_after_s"]) == (3, pytest.approx(12.0))
    assert ours["first_calls_s"] == pytest.approx(12.0 + 97 * 0.05)
    assert ours["first_calls_over_compile_ratio"] == pytest.approx((12.0 + 97 * 0.05) / (10.1 + 98 * 0.1))
    assert ours["pays_after_compile_calls"] == 39, "1.8 s behind after three calls, 0.05 s back in each"
    assert ours["pays_after_graph_calls"] == 34
    assert found["compile"]["pays_after_graph_calls"] == NEVER
    assert ours["compiled"] == "kernels cached, alone"


def test_starts_that_cannot_be_compared_have_empty_columns() -> None:
    encore = (10.0, 1.0, 1.0)
    ours = rows(measured("compile", (10.0, 0.1), 100.0, conditions=None), measured("encore", encore, 50.0))["encore"]
    assert ours["pays_after_compile_calls"] is None and ours["first_calls_s"] is not None, "under other conditions"
    older = measured("graph", (10.0, 0.1), 100.0).model_copy(update={"compile": None})
    found = rows(older, measured("encore", encore, 50.0, settled=False))
    assert list(found) == ["encore"]
    assert found["encore"]["settled_after_calls"] is None
