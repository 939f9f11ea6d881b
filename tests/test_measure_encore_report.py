"""Encore's own account of a cell goes into its row as plain JSON."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from optimizations.recording_report import RecordingReport, ReplayedInput
from optimizations.report import LEDGER, Entry, PlacementReport
from suite.measure.encore_report import encore_report
from suite.schema import Metrics


@pytest.fixture(autouse=True)
def empty_ledger() -> Iterator[None]:
    LEDGER.clear()
    yield
    LEDGER.clear()


def test_nothing_compiled_is_an_empty_list() -> None:
    assert encore_report() == []


def test_recordings_stand_in_the_row_and_are_read_back() -> None:
    entry = Entry(PlacementReport("cuda:0", None, 4))
    LEDGER.add(entry)
    entry.recordings.append(
        RecordingReport(
            direction="backward",
            nodes=7,
            kernels=6,
            inputs=(ReplayedInput(0, "tangents_1", 4096, True, False, 2, 3, ("host",), ()),),
            copied_bytes=0,
            pointer_bytes=24,
            fallbacks=(),
            off=None,
            proof_runs=8,
            indirection_s=1.5,
        )
    )
    found = encore_report()
    metrics = Metrics(coverage=None, graphs=None, copies=None, memory=None, kernel_time_us=None, encore_report=found)
    again = Metrics.model_validate_json(metrics.model_dump_json()).encore_report
    assert again == found
    (recording,) = found[0]["recordings"]  # type: ignore[index, call-overload]
    assert recording["inputs"][0]["appliers"] == ["host"]
    assert recording["pointer_bytes"] == 24
