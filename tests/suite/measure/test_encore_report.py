"""Encore's report of a cell is written into its row as plain JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import suite.measure.source_line
from optimizations.report import ENTRIES, CompiledGraph, Copy, Entry, Left, PlacementReport
from optimizations.report.concurrency import ConcurrencyReport, OrderedLaunch
from optimizations.report.recordings import CountedCalls, KeptResults, RecordingReport, ReplayedInput, SelectionReport
from optimizations.stack_trace import Frame
from suite.measure.graphs import encore_report
from suite.measure.source_line import line_of_frame, short_line, short_path
from suite.results.schema import Metrics


@pytest.fixture(autouse=True)
def empty_ledger() -> Iterator[None]:
    ENTRIES.clear()
    yield
    ENTRIES.clear()


def test_lines_and_messages_contain_no_local_path() -> None:
    assert encore_report() == []
    path = f"{Path(__file__).resolve().parents[3]}/models/networks/clip.py"
    shown = "models/networks/clip.py:144 in forward: mask = self.mask"
    copies = tuple(
        Copy("to", "mask", 8, True, line)
        for line in (f"{path}:144 in forward: mask = self.mask", "/home/user/program.py:3 in <lambda>")
    )
    left = (Left("add", "aten.add", "it is random", None),)
    entry = Entry(PlacementReport("cuda:0", f"placement failed: {path} is odd", 4, copies_before=copies, left=left))
    trace = f'  File "{path}", line 144, in forward\n    mask = self.mask'
    entry.compiled.append(CompiledGraph("inference", 1, (f"cpu ops. Found from : \n {trace}",)))
    ENTRIES.append(entry)
    (report,) = encore_report()
    assert isinstance(report, dict)
    placement = report["placement"]
    assert [copy["source_line"] for copy in placement["copies_before"]] == [shown, "program.py:3 in <lambda>"]
    assert placement["left"][0]["source_line"] is None
    text = json.dumps(report)
    assert path not in text and f"cpu ops [{shown}]" in text


def test_recordings_are_written_to_the_row_and_read_back() -> None:
    entry = Entry(PlacementReport("cuda:0", None, 4))
    ENTRIES.append(entry)
    recording = RecordingReport(
        direction="backward",
        nodes=7,
        kernels=6,
        inputs=(ReplayedInput(0, "tangents_1", 4096, True, False, 2, 3, ("host",), ()),),
        copied_bytes=0,
        pointer_bytes=24,
        fallbacks=(),
        off=None,
        concurrency=ConcurrencyReport("chain", "it is faster", order=(OrderedLaunch("mm", ("gemm",), ()),)),
    )
    selection = SelectionReport("backward", "copies", "measured", 6, 4096, 0, (("copies", 64.4), ("in place", 80.5)))
    entry.functions.append(
        SimpleNamespace(
            recordings=lambda: [recording],
            kept=lambda: KeptResults("backward", (0,), copies=3, copied_bytes=96),
            uncaptured=lambda: [CountedCalls("backward", "its forward ran without a graph", 2)],
            selection=lambda: selection,
            slow_calls=lambda: [CountedCalls("inference", "the program holds a result", 3)],
        )
    )
    metrics = Metrics(encore_report=encore_report())
    read: Any = Metrics.model_validate_json(metrics.model_dump_json()).encore_report
    assert read == metrics.encore_report
    (found,) = read
    (recorded,), (chosen,) = found["recordings"], found["selection"]
    assert recorded["concurrency"]["reason"] == "it is faster" and "order" not in recorded["concurrency"]
    assert (recorded["inputs"][0]["updaters"], recorded["pointer_bytes"]) == (["host"], 24)
    counts = (found["kept"][0]["copies"], found["uncaptured"][0]["calls"], found["slow_calls"][0]["calls"])
    assert counts == (3, 2, 3)
    assert (chosen["decision"], chosen["median_us"][0]) == ("copies", ["copies", 64.4])


def test_lines_are_written_the_same_way_on_every_machine():
    path = "/home/x/venv/lib/python3.12/site-packages/transformers/models/gpt2/modeling_gpt2.py"
    frame = Frame(path, 573, "forward", "x = self.linear(ids)")
    line = "transformers/models/gpt2/modeling_gpt2.py:573 in forward: x = self.linear(ids)"
    assert line_of_frame(frame) == short_line(str(frame)) == line
    assert short_path("/a/c.py") == "c.py"
    assert short_path(suite.measure.source_line.__file__) == "suite/measure/source_line.py"
