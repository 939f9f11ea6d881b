"""The papers' exhibits of how often CUDA graphs help, and how many replay calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixtures.synthetic_results import cell, metrics

from suite.report.chart import Chart, LineChart, draw
from suite.report.paper.counts import judged_groups
from suite.results.schema import Cell
from tests.suite.report.test_paper import made, results, row


def test_distributions_and_classes_count_workloads() -> None:
    cells = [cell(name, mode, time) for name, time in (("A", 50), ("B", 99.5), ("C", 200))
             for mode, time in (("compile", 100.0), ("graph-unpartitioned", time))]  # fmt: skip
    done = made("pygraph-fig2", results(*cells))
    assert isinstance(done.chart, Chart)
    stock = {name: done.chart.bars[name, "graph-unpartitioned"] for name in done.chart.groups}
    assert [bar.label for bar in stock.values()] == ["1 of 3"] * 3
    assert stock["faster"].published == pytest.approx(45.9, abs=0.02)
    done = made("fig4", results(*cells))
    assert isinstance(done.chart, LineChart)
    (points,) = done.chart.lines.values()
    assert [round(y) for _, y in points] == [0, 33, 67, 100]
    assert [x for x, _ in points[1:]] == pytest.approx([0.5, 1.005, 2], abs=0.001)
    assert any("slower: 1 of 3" in str(text) for text in done.table.frame["workload"])


def selected(
    group: int, kept: str | None, none: float, copy: float, indirection: float | None = None, *, undecided: bool = False
) -> dict[str, object]:
    """Return the fields that exhibits read of a record of `optimizations.report()[i].selection`; times in us."""
    times = {"none": none, "copy": copy, "indirection": indirection} if kept or undecided else {}
    return {
        "group": group,
        "kept": kept,
        "candidates": [{"candidate": name, "median_us": time} for name, time in times.items()],
    }


def with_graphs(*graphs: list[dict[str, object]], workload: str = "EOS") -> Cell:
    """EOS in mode encore, with these selections in each of its FX graphs."""
    report = [{"index": index, "selection": graph} for index, graph in enumerate(graphs)]
    return cell(workload, "encore", 80, metrics=metrics().model_copy(update={"encore_report": report}))


@pytest.mark.parametrize("unit", ["graphs", "workloads"])
def test_workload_also_run_under_tp_counts_once(unit: str) -> None:
    """Without --tp where that has something to count, else on the fewest GPUs; variants are programs of their own."""

    def rows(workload: str, speedup: float | None, variant: str = "published") -> list[Cell]:
        if unit == "graphs":
            kept = "copy" if speedup is not None else None
            made = with_graphs([selected(1, kept, 10 * (speedup or 1), 10)], workload=workload)
            return [made.model_copy(update={"variant": variant})]
        modes = (("compile", 100.0), ("graph-unpartitioned", 100 / speedup)) if speedup else (("compile", 100.0),)
        return [cell(workload, mode, time, variant=variant) for mode, time in modes]

    run = results(
        *rows("ST", 3), *rows("ST@tp1", 2), *rows("ST@tp2", 5), *rows("ST@tp1", 4, "current"),
        *rows("VM", None), *rows("VM@tp1", 0.5), *rows("VM@tp2", 0.25),
        *rows("XLNET-I@tp10", 7), *rows("XLNET-I@tp2", 6),
    )  # fmt: skip
    mode = "graph" if unit == "graphs" else "graph-unpartitioned"
    found = {
        each["workload"]: each["speedup"]
        for each in made("fig4", run).table.frame.to_dict("records")
        if each["mode"] == mode and not each["workload"].startswith("slower")
    }
    number = " 0" if unit == "graphs" else ""
    labels = {"VM@tp1": 0.5, "ST": 3, "ST@tp1 (current)": 4, "XLNET-I@tp2": 6}
    assert found == {f"{label}{number}": pytest.approx(value) for label, value in labels.items()}
    classes = made("pygraph-fig2", run).table.frame.to_dict("records")
    assert {each[f"{mode}_count"].partition(" of ")[2] for each in classes} == {"4"}


def test_undecided_workload_is_named_and_not_counted_split() -> None:
    """VM: of 386 graphs together, and next to it two of them alone under --tp, which were the slowest."""
    run = results(
        with_graphs([selected(1, None, 240, 210, undecided=True)], workload="VM"),
        with_graphs([selected(1, "copy", 10, 20)], workload="VM@tp1"),
        with_graphs([selected(1, "copy", 20, 10)], workload="ST"),
    )
    for name in ("fig4", "pygraph-fig2"):
        done = made(name, run)
        assert done.chart is not None
        for note in (done.table.note, done.chart.note):
            assert "Not counted, for they were timed and have no verdict: VM 0." in note
    counted = {each["workload"] for each in made("fig4", run).table.frame.to_dict("records") if each["speedup"]}
    assert counted == {"ST 0"}
    assert "have no verdict" not in made("fig4", results(run.run.cells[-1])).table.note


def test_graphs_are_counted_where_selection_timed_them() -> None:
    run = results(
        cell("EOS", "compile", 100),
        with_graphs(
            [selected(1, "none", 10, 20), selected(2, "copy", 30, 20, 21)],
            [selected(3, "indirection", 40, 20, 10)],
            [selected(3, "indirection", 40, 20, 10), selected(4, None, 1, 1)],
        ),
    )
    done = made("fig4", run)
    found = {
        (each["mode"], each["workload"]): each["speedup"]
        for each in done.table.frame.to_dict("records")
        if not each["workload"].startswith("slower")
    }
    assert found == {
        ("graph", "EOS 0"): 0.5,
        ("graph", "EOS 1"): 1.5,
        ("graph", "EOS 2"): 2.0,
        ("encore", "EOS 0"): 1.0,
        ("encore", "EOS 1"): 1.5,
        ("encore", "EOS 2"): 4.0,
    }, "a forward and its backward are one group, and what was not timed is not counted"
    assert row(done, "slower: 1 of 3")["published"] == "29 of 116 CUDA graphs"
    mixed = made("fig4b", run)
    assert (row(mixed, "EOS")["faster"], row(mixed, "EOS")["slower"]) == (2, 1)
    assert mixed.points[0].measured == "1 of 1" and mixed.points[0].published == "about half of 20"
    classes = made("pygraph-fig2", run).table.frame.to_dict("records")
    assert [(each["class"], each["graph_count"], each["encore_count"]) for each in classes] == [
        ("faster", "2 of 3", "2 of 3"), ("within 2 %", "0 of 3", "1 of 3"), ("slower", "1 of 3", "0 of 3"),
    ]  # fmt: skip
    assert done.chart is not None
    assert draw(replace(done.chart, name="test"), done.provenance).axes


def test_replayed_graphs_are_counted() -> None:
    run = results(
        with_graphs(
            [selected(1, "none", 10, 20), selected(2, "copy", 30, 20, 21)],
            [selected(3, "indirection", 40, 20, 10), selected(3, "indirection", 40, 20, 10), selected(4, None, 1, 1)],
        ),
        cell("ST", "encore"),
    )
    done = made("pygraph-table4", run)
    found = row(done, "EOS")
    assert [found[name] for name in ("total", "enabled", "indirected", "disabled", "undecided")] == [5, 3, 2, 1, 1]
    assert row(done, "ST")["missing"] == "no graph was recorded"
    assert row(done, "all")["enabled"] == 3
    assert done.points[0].published == "not known here", "416 is the count of Fig. 2"
    enabled = made("graphs-enabled", run)
    assert (row(enabled, "published")["enabled"], row(enabled, "published")["total"]) == (97, 123)
    assert (enabled.points[0].published, enabled.points[0].measured) == ("97 of 123", "3 of 5")


def test_decisions_by_rule_are_counted() -> None:
    record = {"direction": "inference", "decision": "no graph", "why": "tiny", "kernels": 1, "copied_bytes": None}
    record |= {"nodes": 0, "median_us": []}
    pending = {**record, "decision": None}
    timed = {**record, "decision": "in place", "median_us": [["in place", 10.0], ["copies", 20.0], ["no graph", 40.0]]}
    run = results(with_graphs([record, timed], [pending]))
    found = row(made("pygraph-table4", run), "EOS")
    assert [found[name] for name in ("total", "enabled", "indirected", "disabled", "undecided")] == [3, 1, 1, 1, 1]
    (group,) = (one for one in judged_groups(run.run.cells[0]) if one.median_us)  # type: ignore[union-attr]
    assert (group.gain("copy"), group.gain("indirection")) == (2, 4)


def test_records_of_selection_of_another_version_are_left_out() -> None:
    run = results(with_graphs([{**selected(1, "none", 10, 20), "group": "elsewhere"}, {"kept": "copy"}]))
    assert row(made("pygraph-table4", run), "EOS")["missing"] == "no graph was recorded"
