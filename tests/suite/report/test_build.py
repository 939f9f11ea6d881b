"""The whole report: what is written, that the page stands alone, shows failures, labels smoke runs and is inert."""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import shutil
import subprocess

import pytest
from fixtures.report_pages import Outline, few_exhibits, page_of, undrawn  # noqa: F401  # fixtures are used by their names
from fixtures.synthetic_results import block, cell, environment, failed_cell, write_run

from suite.report import build
from suite.report.build import build_report
from suite.report.page import LONG_TABLE, SHOWN_OF_LONG
from suite.results.errors import WrongUse
from suite.results.schema import GpuState, Status

HOSTILE = '<script>alert("x")</script>'


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A report of a run of two workloads, one cell failed."""
    folder = tmp_path_factory.mktemp("both")
    factors = {"eager": 0.5, "compile": 1, "graph": 2, "encore": 4}
    hot = block(0, [100.0]).model_copy(update={"gpu_after": GpuState(throttle_reasons=["SwPowerCap", "GpuIdle"])})
    cells = [
        *(cell("EOS", mode, 100.0 / factor) for mode, factor in factors.items()),
        cell("ST", "compile"),
        cell("ST", "encore", blocks=[hot, block(1, [100.0])]),
        failed_cell("ST", "graph", Status.CRASH, f"worker died {HOSTILE}", log_tail="the log's last line"),
        cell(HOSTILE, "compile"),
        cell(HOSTILE, "graph"),
    ]
    run = write_run(folder / "run", cells, environment(settings={"note": HOSTILE}))
    report = build_report([run], folder / "out", folder / "out" / "figures")
    return report, Outline(report.html.read_text())


def test_report_names_its_written_files(both):
    report, _ = both
    assert report.warning is None
    drawn = {path.stem for path in report.figures}
    assert {"over_compile", "paper_fig4", "paper_pygraph_fig2"} <= drawn
    assert {path.suffix for path in report.figures} == {".png"}
    assert all(path.is_file() and path.stat().st_size > 0 for path in (report.html, *report.tables, *report.figures))
    written = {path for path in report.html.parent.rglob("*") if path.is_file()}
    assert written == {report.html, *report.tables, *report.figures}
    assert report.drawn == len(report.figures) == report.html.read_text().count("<svg")


def test_page_loads_nothing(both):
    _, page = both
    for tag, attributes in page.elements:
        for name in ("src", "href", "xlink:href", "data", "action", "srcset"):
            value = attributes.get(name, "")
            is_download = tag == "a" and "download" in attributes  # followed by a reader, not loaded by the page
            assert value == "" or value.startswith("#") or is_download, (tag, value)
    assert not page.named("link") and not page.named("img")
    assert not re.search(r"url\((?!#)|@import", "".join(page.texts["style"]))


def test_policy_lets_only_the_sorting_script_run(both):
    _, page = both
    (policy,) = [meta["content"] for meta in page.named("meta") if "http-equiv" in meta]
    (script,) = page.texts["script"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "aria-sort" in script and "alert(" not in script
    assert any(HOSTILE in text for text in page.texts["td"]), "names are text"


def test_headings_sort_by_keyboard_and_say_so(both):
    _, page = both
    headings = page.named("th")
    assert headings and all(heading["aria-sort"] == "none" for heading in headings)
    assert len(page.texts["button"]) == len(headings)
    assert all(button["type"] == "button" for button in page.named("button"))
    assert all(region["tabindex"] == "0" for region in page.named("div") if region.get("role") == "region")


def test_ids_are_unique_and_links_lead_somewhere(both):
    _, page = both
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {
        attributes["href"][1:] for tag, attributes in page.elements if tag == "a" and "download" not in attributes
    }
    assert targets <= set(ids)


def test_failed_cells_show_status_error_and_log(both):
    _, page = both
    assert "crash" in page.texts["td"]
    assert f"worker died {HOSTILE}" in page.texts["td"]
    assert any("the log's last line" in text for text in page.texts["pre"])
    assert "ST, graph: crash" in page.texts["summary"]


def test_page_shows_run_environment_and_sources(both):
    report, page = both
    text = report.html.read_text()
    headings = " ".join(page.texts["h2"])
    for title in ("Speed-up", "Coverage", "Copies", "How to read this", "Where this is from"):
        assert title in headings
    assert "0123456789abcdef" in text and "SYNTHETIC GPU" in text
    assert "OSDI 2026" in text and "NVIDIA H100 NVL" in text
    assert re.search(r"THROTTLED while measured, .*: ST \(SwPowerCap\)", text), "other reasons are no warning"
    assert len(page.named("svg")) == len(report.figures), "each as PNG, and in the page"


def test_smoke_runs_are_labelled_everywhere(tmp_path):
    cells = [cell("EOS", mode, device="cpu", size="tiny") for mode in ("compile", "graph")]
    report = build_report([write_run(tmp_path / "run", cells, environment(gpu=None))], tmp_path / "out")
    page = Outline(report.html.read_text())
    warning = "SMOKE RUN on the CPU and in tiny size: these numbers say nothing about performance"
    assert report.warning == warning
    assert page.texts["title"][0].startswith("[smoke]")
    assert [meta["content"] for meta in page.named("meta") if meta.get("name") == "warning"] == [warning]
    rows = [row for path in report.tables for row in csv.DictReader(path.open())]
    assert rows and {row["warning"] for row in rows} == {warning}


def test_same_results_give_the_same_bytes_whatever_their_order(tmp_path):
    cells = [cell(name, mode, 100.0 + len(mode)) for name in ("EOS", "ST") for mode in ("compile", "graph", "encore")]
    reports = [
        build_report([write_run(tmp_path / name, order)], tmp_path / f"{name}-out")
        for name, order in (("first", cells), ("second", cells[::-1]))
    ]
    first, second = (
        {path.relative_to(report.html.parent): path.read_bytes() for path in report.html.parent.rglob("*.*")}
        for report in reports
    )
    assert first == second


@pytest.mark.usefixtures("undrawn")
def test_run_of_which_everything_failed_is_still_reported(tmp_path):
    cells = [failed_cell("EOS", mode, Status.OOM) for mode in ("compile", "graph")]
    report = build_report([write_run(tmp_path / "run", cells)], tmp_path / "out")
    assert report.figures == []
    assert report.html.read_text().count("oom") >= 2
    with pytest.raises(WrongUse, match="no run is measured yet"):
        build_report([], tmp_path)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A report of two runs: EOS of the first, ST of the second (the first has it too)."""
    folder = tmp_path_factory.mktemp("several")
    modes = (("compile", 1), ("graph", 2))
    runs = []
    for day, run_id, workloads in ((1, "first", ("EOS", "ST")), (2, "second", ("ST",))):
        of = environment(run_id=run_id, created_at=f"2026-01-0{day}T00:00:00+00:00", git_commit=str(day) * 40)
        cells = [cell(workload, mode, 100.0 * day / factor) for workload in workloads for mode, factor in modes]
        runs.append(write_run(folder / run_id, cells, of))
    readme = folder / "README.md"
    readme.write_text("<!-- generated: headline -->\n<!-- end: headline -->\n")
    return build_report(runs, folder / "out", readme=readme), readme


def test_each_row_of_several_runs_names_its_run(several):
    report, _ = several
    of_workload = {"EOS": ("run first", "1" * 10), "ST": ("run second", "2" * 10)}
    spanning = ("spans runs first, second", f"{'1' * 10}, {'2' * 10}")
    found = set()
    for path in report.tables:
        if path.suffix == ".csv":
            for row in csv.DictReader(path.open()):
                assert (row["source"], row["commit"]) == of_workload.get(row.get("workload"), spanning), path.name
                assert row["device"] == "SYNTHETIC GPU"
                found.add(row["source"])
    assert found == {"run first", "run second", spanning[0]}


def test_report_of_several_runs_names_all_of_them(several):
    report, readme = several
    page = Outline(report.html.read_text())
    caption = "SYNTHETIC GPU, PyTorch 0.0+synthetic, driver 580.0, run first (commit 1111111111), run second (commit"
    lines = ("Of run first: EOS.", "Of run second: ST.")
    assert "first, second" in page.texts["title"][0]
    assert any(text.startswith(caption) for text in page.texts["p"])
    assert set(lines) <= set(page.texts["p"])
    assert {"1" * 40, "2" * 40} <= set(page.texts["dd"]), "the environment of each run"
    text = readme.read_text()
    assert caption in text and all(f"- {line}" in text for line in lines)


def test_page_runs_from_the_conclusion_to_the_provenance(both):
    report, page = both
    text = report.html.read_text()
    order = ["<h1>", "<svg", 'id="filter-form"', 'id="section-speedup"', 'id="section-origin"']
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    (sentence,) = page.texts["h1"]
    assert sentence.startswith(
        "Encore (encore) is 2.00 times as fast as stock CUDA graphs over 1 of GraCE's 25 workloads ("
    )
    assert sentence.endswith("faster in 1; 1 more cannot be compared.")
    assert "Encore: run synthetic" in page.texts["title"][0]


def test_every_table_links_to_its_csv(both):
    report, page = both
    links = [attributes["href"] for attributes in page.named("a") if "download" in attributes]
    assert len(links) >= 12
    assert all((report.html.parent / link).is_file() for link in links)
    shown = {attributes["aria-labelledby"] for attributes in page.named("div") if attributes.get("role") == "region"}
    assert {f"tables/{name}.csv" for name in shown} == set(links)


def test_csv_holds_raw_values_and_reasons(both):
    report, _ = both
    tables = report.html.parent / "tables"
    found = {(row["workload"], row["mode"]): row for row in csv.DictReader((tables / "speedups.csv").open())}
    eager = found["EOS", "eager"]
    assert float(eager["low"]) <= float(eager["speedup"]) == pytest.approx(0.5, rel=0.05)
    assert (eager["verdict"], eager["alternating"]) == ("SLOW", "True")
    assert (found["ST", "graph"]["speedup"], found["ST", "graph"]["missing"]) == ("", "crash")
    for path in tables.glob("*.csv"):
        names = next(csv.reader(path.open()))
        assert len(names) == len(set(names)), path.name


@pytest.mark.usefixtures("undrawn")
def test_page_cuts_long_tables_and_keeps_the_csv_whole(tmp_path):
    labels = [f"W{number}" for number in range(LONG_TABLE + 1)]
    run = write_run(tmp_path / "run", [cell(label, "compile") for label in labels])
    report = build_report([run], tmp_path / "out")
    assert len(list(csv.DictReader((tmp_path / "out" / "tables" / "times.csv").open()))) == len(labels)
    page = Outline(report.html.read_text())
    assert any(text.startswith(f"The first {SHOWN_OF_LONG} of {len(labels)} rows") for text in page.texts["p"])
    assert "<td" in report.html.read_text() and len(report.html.read_text()) < 1_000_000


@pytest.mark.usefixtures("undrawn")
def test_encores_columns_come_first_and_are_highlighted(tmp_path):
    cells = [cell("EOS", mode) for mode in ("eager", "compile", "graph", "placement", "indirection")]
    page = page_of(tmp_path, cells)
    headings = page.texts["button"]
    start = headings.index("workload")
    assert headings[start : start + 4] == ["workload", "indirection", "placement", "compile (µs)"]
    own = [attributes for attributes in page.named("th") if "own" in attributes.get("class", "").split()]
    assert len(own) >= 4


@pytest.mark.usefixtures("undrawn")
def test_failed_cell_looks_failed_and_no_other_does(tmp_path):
    cells = [cell("EOS", "compile"), failed_cell("EOS", "graph", Status.FAIL_ACCURACY), cell("EOS", "placement")]
    page = page_of(tmp_path, cells)
    rows = [attributes.get("class", "").split() for attributes in page.named("tr")]
    assert sum("failed" in classes for classes in rows) >= 5, "in each table with a row per cell"
    failures = [
        text
        for (tag, attributes), text in zip(
            [element for element in page.elements if element[0] == "td"], page.texts["td"], strict=True
        )
        if "failure" in attributes.get("class", "").split()
    ]
    assert failures and {text.rpartition(": ")[2] for text in failures} == {"fail_accuracy"}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_script_filters_rows_and_sorts_numbers_before_words():
    script = (build.__file__.rpartition("/")[0]) + "/page/report.js"
    program = """
    const fs = require("fs"), vm = require("vm");
    const row = (texts, classes, failure) => ({
      cells: texts.map(text => ({textContent: text})), hidden: false,
      classList: {contains: name => classes.includes(name)}, querySelector: () => failure ? {} : null,
    });
    const rows = [row(["EOS", "graph", "pass"], []), row(["EOS", "compile", "oom"], ["failed"]),
                  row(["XLNET-I", "1.2 FAST", "fail_accuracy"], [], true)];
    const table = {tBodies: [{rows}], classList: {toggle: (name, on) => { table.out = on; }}};
    const document = {querySelectorAll: of => of === "table" ? [table] : [], getElementById: () => null};
    const context = {document, Number, Array};
    const names = "; this.show = showMatching; this.compare = compareCells;";
    vm.runInNewContext(fs.readFileSync(process.argv[1], "utf8") + names, context);
    const asked = [["", false], ["eos", false], ["Graph EOS", false], ["", true], ["eos nothing", false]];
    for (const [words, failures] of asked) {
      const said = context.show(words, failures);
      console.log(rows.map(row => row.hidden ? "-" : "x").join(""), table.out, said);
    }
    const cell = (text, sort, missing) => ({textContent: text, dataset: {sort, missing}});
    const cells = [cell("10", "10"), cell("-", undefined, "1"), cell("9", "9"), cell("oom"), cell("1,000", "1000")];
    for (const sign of [1, -1]) {
      console.log(cells.slice().sort((a, b) => context.compare(a, b, sign)).map(c => c.textContent).join(" "));
    }
    """
    lines = subprocess.run(["node", "-e", program, script], capture_output=True, text=True, check=True).stdout
    assert lines.splitlines() == [
        "xxx false ",
        "xx- false 2 of 3 rows",
        "x-- false 1 of 3 rows",
        "-xx false 2 of 3 rows",
        "--- true 0 of 3 rows",
        "9 10 1,000 oom -",
        "1,000 10 9 oom -",
    ]
