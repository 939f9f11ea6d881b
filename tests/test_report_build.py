"""The whole report: what is written, that the page stands alone, shows failures, labels smoke runs and is inert."""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from fixtures.synthetic_results import (
    WORKLOADS,
    cell,
    environment,
    explanation,
    failed_cell,
    large_run_cells,
    write_explanations,
    write_run,
)

from suite.errors import WrongUse
from suite.report import build, paper
from suite.report.build import FIGURE_NAMES, build_report
from suite.report.paper import EXHIBITS
from suite.schema import Status
from suite.store import CannotWrite, InvalidResults

HOSTILE = '<script>alert("x")</script>'


class Outline(HTMLParser):
    """Elements with their attributes, and the text of each table cell, script and heading."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.texts = {}
        self._open = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self._open:
            self.texts[self._open[-1]][-1] += data

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module", autouse=True)
def few_exhibits():
    """Three of the papers' twenty: a figure of bars, one of lines, a table. All are tested where they are made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper, "EXHIBITS", {name: EXHIBITS[name] for name in ("fig4", "pygraph-fig2", "table1")})
        yield


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A report of a run of two workloads, one cell failed, and of an explanation of each."""
    folder = tmp_path_factory.mktemp("both")
    cells = [
        *(cell("EOS", mode, 100.0 / factor) for mode, factor in (("eager", 0.5), ("compile", 1), ("graph", 2))),
        cell("ST", "compile"),
        failed_cell("ST", "graph", Status.CRASH, f"worker died {HOSTILE}", log_tail="the log's last line"),
    ]
    run = write_run(folder / "run", cells)
    explanations = write_explanations(folder / "explain", [explanation("EOS"), explanation("ST")])
    report = build_report([run], explanations, folder / "out")
    return report, Outline(report.html.read_text())


@pytest.fixture
def undrawn(monkeypatch):
    """Figures take seconds; where it is about files, a name stands for each."""
    monkeypatch.setattr(build, "draw_any", lambda chart, origin: chart.name)
    for form in ("to_png", "to_pdf"):
        monkeypatch.setattr(build, form, lambda figure: figure.encode())
    monkeypatch.setattr(build, "to_svg", lambda figure, name: "<svg></svg>")


def test_report_names_what_it_wrote(both):
    report, _ = both
    assert (report.run_id, report.explained, report.failed_cells, report.warning) == ("synthetic", 2, 1, None)
    drawn = {path.stem for path in report.figures}
    assert drawn == {*FIGURE_NAMES, "paper_fig4", "paper_pygraph_fig2"}
    assert {path.suffix for path in report.figures} == {".png", ".pdf"}
    assert all(path.is_file() and path.stat().st_size > 0 for path in (report.html, *report.tables, *report.figures))
    written = {path for path in report.html.parent.rglob("*") if path.is_file()}
    assert written == {report.html, *report.tables, *report.figures, report.html.parent / build.WRITTEN}


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
    assert "aria-sort" in script


@pytest.mark.usefixtures("undrawn")
def test_names_and_errors_are_inert(tmp_path):
    run = write_run(
        tmp_path / "run",
        [cell(HOSTILE, "compile"), cell(HOSTILE, "graph"), failed_cell(HOSTILE, "eager", Status.CRASH, HOSTILE)],
        environment(settings={"note": HOSTILE}),
    )
    explanations = write_explanations(tmp_path / "explain", [explanation("ST", limits=[HOSTILE])])
    text = build_report([run], explanations, tmp_path / "out").html.read_text()
    assert text.count("<script>") == 1
    assert "alert(" in text and not re.search(r"<script>[^<]*alert\(", text)


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


def test_page_shows_run_and_explanations_environment_and_sources(both):
    report, page = both
    text = report.html.read_text()
    headings = " ".join(page.texts["h2"])
    for title in ("Speed-up", "Coverage", "Copies", "analysis without a GPU", "How to read this", "Where this is from"):
        assert title in headings
    assert "0123456789abcdef" in text and "SYNTHETIC GPU" in text
    assert "OSDI 2026" in text and "NVIDIA H100 NVL" in text
    assert len(page.named("svg")) == len(report.figures) / 2, "each as PNG and PDF, and in the page"


def test_explanations_alone_make_a_report(tmp_path):
    explanations = write_explanations(tmp_path / "explain", [explanation("ST")])
    report = build_report([], explanations, tmp_path / "out", tmp_path / "figures")
    page = Outline(report.html.read_text())
    assert (report.run_id, report.explained, report.failed_cells) == (None, 1, 0)
    assert {path.stem for path in report.figures} == {"explain_kernels", "explain_bytes"}
    assert "Environment" not in page.texts["h2"] and "Speed-up" not in page.texts["h2"]
    assert "5.14" in page.texts["td"]


def test_smoke_runs_are_labelled_in_the_head_the_page_and_the_report(tmp_path):
    cells = [cell("EOS", mode, device="cpu", size="tiny") for mode in ("compile", "graph")]
    report = build_report([write_run(tmp_path / "run", cells, environment(gpu=None))], None, tmp_path / "out")
    page = Outline(report.html.read_text())
    warning = "SMOKE RUN on the CPU and in tiny size: these numbers say nothing about performance"
    assert report.warning == warning
    assert page.texts["title"][0].startswith("[smoke]")
    assert [meta["content"] for meta in page.named("meta") if meta.get("name") == "warning"] == [warning]
    tables = [text for path in report.tables if path.suffix == ".md" for text in [path.read_text()]]
    assert tables and all(warning in text for text in tables)


def test_same_results_give_the_same_bytes_whatever_their_order(tmp_path):
    cells = large_run_cells(WORKLOADS[:2])
    reports = [
        build_report([write_run(tmp_path / name, order)], None, tmp_path / f"{name}-out")
        for name, order in (("first", cells), ("second", cells[::-1]))
    ]
    first, second = (
        {path.relative_to(report.html.parent): path.read_bytes() for path in report.html.parent.rglob("*.*")}
        for report in reports
    )
    assert first == second


@pytest.mark.usefixtures("undrawn")
def test_a_report_in_a_folder_of_an_earlier_one_removes_what_that_one_wrote_and_nothing_else(tmp_path):
    out = tmp_path / "out"
    run = write_run(tmp_path / "run", [cell("EOS", "compile"), cell("EOS", "graph")])
    build_report([run], None, out)
    assert (out / "figures" / "speedup.png").is_file()
    assert (out / "tables" / "times.csv").is_file()
    mine = (out / "README.md", out / "figures" / "explain_drawing.png", out / "tables" / "my.csv")
    for path in mine:
        path.write_text("mine")
    report = build_report([], write_explanations(tmp_path / "explain", [explanation()]), out)
    left = {path for path in out.rglob("*") if path.is_file()}
    assert left == {report.html, *report.tables, *report.figures, *mine, out / build.WRITTEN}
    assert not {path.stem for path in left} & {"speedup", "times"}


@pytest.mark.usefixtures("undrawn")
def test_a_list_of_written_files_that_names_others_removes_none_of_them(tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("beside.txt", "absolute.txt"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "out" / build.WRITTEN).write_text(
        f"../beside.txt\n{tmp_path / 'absolute.txt'}\ntables/../../beside.txt\n"
    )
    build_report([write_run(tmp_path / "run", [cell("EOS", "compile")])], None, tmp_path / "out")
    assert (tmp_path / "beside.txt").is_file() and (tmp_path / "absolute.txt").is_file()


@pytest.mark.usefixtures("undrawn")
def test_a_folder_of_figures_that_is_named_keeps_its_other_figures(tmp_path):
    """The repository's own figures are of several reports, and are tracked."""
    figures = tmp_path / "figures"
    figures.mkdir()
    for name in ("explain_kernels.png", "drawing.png"):
        (figures / name).write_text("mine")
    run = write_run(tmp_path / "run", [cell("EOS", "compile"), cell("EOS", "graph")])
    for out in ("out", "out", "other"):
        build_report([run], None, tmp_path / out, figures)
    assert (figures / "explain_kernels.png").read_text() == (figures / "drawing.png").read_text() == "mine"
    assert (figures / "speedup.png").read_text() == "speedup"


@pytest.mark.usefixtures("undrawn")
def test_without_a_named_folder_figures_stay_in_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "FIGURES", tmp_path / "figures")
    report = build_report([write_run(tmp_path / "run", [cell("EOS", "compile")])], None, tmp_path / "out")
    assert report.figures
    assert {path.parent for path in report.figures} == {tmp_path / "out" / "figures"}


@pytest.mark.parametrize("wrong", ["out", "out/below", "figures", "tables"])
def test_a_file_in_the_way_is_wrong_use_before_anything_is_drawn(tmp_path, monkeypatch, wrong):
    monkeypatch.setattr(build, "draw_any", lambda *_: pytest.fail("drawn before the folders were looked at"))
    run = write_run(tmp_path / "run", [cell("EOS", "compile")])
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / ("file" if wrong != "tables" else "tables")).write_text("")
    places = {
        "out": (tmp_path / "taken" / "file", None),
        "out/below": (tmp_path / "taken" / "file" / "below", None),
        "figures": (tmp_path / "out", tmp_path / "taken" / "file"),
        "tables": (tmp_path / "taken", None),
    }
    with pytest.raises(WrongUse, match="a file is in the way; give a folder"):
        build_report([run], None, *places[wrong])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"# A page without a generated part", "0 generated parts 'recorded'"),
        (b"<!-- generated: recorded -->\n<!-- end: recorded -->\n" * 2, "2 generated parts 'recorded'"),
        (b"\xff\xfe", "no UTF-8 text"),
    ],
)
def test_a_readme_that_cannot_take_the_tables_is_wrong_use_before_anything_is_drawn(
    tmp_path, monkeypatch, content, words
):
    monkeypatch.setattr(build, "draw_any", lambda *_: pytest.fail("drawn before the README was looked at"))
    run = write_run(tmp_path / "run", [cell("EOS", "compile")])
    readme = tmp_path / "README.md"
    if content is not None:
        readme.write_bytes(content)
    with pytest.raises(WrongUse, match=words):
        build_report([run], None, tmp_path / "out", readme=readme)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("undrawn")
def test_failures_that_newer_rows_stand_for_are_listed(tmp_path):
    runs = []
    for day, cells in (
        (1, [cell("EOS", "compile"), failed_cell("EOS", "graph", Status.OOM, "too large"), cell("ST", "compile")]),
        (2, [cell("EOS", "compile"), cell("EOS", "graph")]),
    ):
        of = environment(run_id=f"run-{day}", created_at=f"2026-01-0{day}T00:00:00+00:00")
        runs.append(write_run(tmp_path / f"run-{day}", cells, of))
    retried = failed_cell("ST", "compile", Status.CRASH, "died")
    (runs[0] / "retried.jsonl").write_text(retried.model_dump_json() + "\n")
    report = build_report(runs, None, tmp_path / "out")
    assert (report.failed_cells, report.superseded_cells) == (0, 2)
    rows = list(csv.DictReader((tmp_path / "out" / "tables" / "superseded.csv").open()))
    assert [(row["workload"], row["mode"], row["status"], row["failed_in"], row["replaced_by"]) for row in rows] == [
        ("ST", "compile", "crash", "run-1", "the same run"),
        ("EOS", "graph", "oom", "run-1", "run-2"),
    ]
    page = Outline(report.html.read_text())
    assert "too large" in page.texts["td"]
    assert any("2 that failed before were measured again" in text for text in page.texts["p"])


@pytest.mark.usefixtures("undrawn")
def test_a_last_line_that_was_cut_short_is_mentioned(tmp_path):
    run = write_run(tmp_path / "run", [cell("EOS", "compile")])
    with (run / "cells.jsonl").open("ab") as file:
        file.write(b'{"schema_ver')
    report = build_report([run], None, tmp_path / "out")
    assert "cut short" in report.warning and "--resume" in report.warning
    assert "cut short" in report.html.read_text()


@pytest.mark.usefixtures("undrawn")
def test_smoke_runs_leave_the_repositorys_figures_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "FIGURES", tmp_path / "figures")
    for size, folder in (("tiny", tmp_path / "out" / "figures"), ("full", tmp_path / "figures")):
        run = write_run(tmp_path / size, [cell("EOS", "compile", size=size)])
        report = build_report([run], None, tmp_path / "out", tmp_path / "figures")
        assert {path.parent for path in report.figures} == {folder}


@pytest.mark.usefixtures("undrawn")
def test_a_run_of_which_everything_failed_is_still_reported(tmp_path):
    cells = [failed_cell("EOS", mode, Status.OOM) for mode in ("compile", "graph")]
    report = build_report([write_run(tmp_path / "run", cells)], None, tmp_path / "out")
    assert (report.figures, report.failed_cells) == ([], 2)
    assert report.html.read_text().count("oom") >= 2


def test_a_run_without_a_cell_is_reported_with_what_is_missing(tmp_path):
    settings = {"workloads": ["EOS"], "modes": ["compile", "graph"]}
    report = build_report([write_run(tmp_path / "run", [], environment(settings=settings))], None, tmp_path / "out")
    assert report.missing_cells == 2
    assert Outline(report.html.read_text()).texts["td"].count("not run") == 2


def test_nothing_to_report_is_wrong_use(tmp_path):
    with pytest.raises(WrongUse, match="encore explain --all --out"):
        build_report([], None, tmp_path)


def test_wrong_results_leave_nothing_behind(tmp_path):
    run = write_run(tmp_path / "run", [cell("EOS", "compile")])
    (run / "cells.jsonl").write_text('{"workload": "EOS"}\n')
    with pytest.raises(InvalidResults, match="line 1"):
        build_report([run], None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_an_error_that_says_the_results_are_intact(tmp_path, monkeypatch):
    def full(path, content):
        raise CannotWrite("go on with the run") from OSError(28, "No space left on device")

    monkeypatch.setattr(build, "write_atomically", full)
    run = write_run(tmp_path / "run", [cell("EOS", "compile")])
    with pytest.raises(CannotWrite, match=r"No space left.*intact"):
        build_report([run], None, tmp_path / "out")


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
    readme.write_text("<!-- generated: recorded -->\n<!-- end: recorded -->\n")
    return build_report(runs, None, folder / "out", readme=readme), readme


def test_every_row_of_a_report_of_several_runs_names_its_own(several):
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


def test_a_report_of_several_runs_names_all_in_page_tables_and_readme(several):
    report, readme = several
    page = Outline(report.html.read_text())
    caption = "SYNTHETIC GPU, PyTorch 0.0+synthetic, driver 580.0, run first (commit 1111111111), run second (commit"
    lines = ("Of run first (commit 1111111111): EOS.", "Of run second (commit 2222222222): ST.")
    assert report.run_id == "first, second"
    assert "first, second" in page.texts["title"][0]
    assert any(text.startswith(caption) for text in page.texts["p"])
    assert set(lines) <= set(page.texts["p"])
    assert {"1" * 40, "2" * 40} <= set(page.texts["dd"]), "the environment of each run"
    for text in (readme.read_text(), (report.html.parent / "tables" / "times.md").read_text()):
        assert caption in text
        assert all(f"- {line}" in text for line in lines)


def test_a_geomean_may_go_over_workloads_of_several_runs(several):
    report, _ = several
    rows = list(csv.DictReader((report.html.parent / "tables" / "geomeans.csv").open()))
    assert {(row["mode"], row["workloads"]) for row in rows} == {("graph", "2")}
    assert all(float(row["speedup"]) == pytest.approx(2.0, rel=0.02) for row in rows if row["metric"] == "latency")


def page_of(tmp_path, cells, of=None, explanations=None):
    runs = [] if cells is None else [write_run(tmp_path / "run", cells, of)]
    return Outline(build_report(runs, explanations, tmp_path / "out").html.read_text())


def test_the_page_begins_with_the_conclusion_its_figure_and_whether_to_trust_it_and_ends_with_where_it_is_from(both):
    report, page = both
    text = report.html.read_text()
    order = ["<h1>", "<svg", 'class="trust', 'id="filter-form"', 'id="section-speedup"', 'id="section-origin"']
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    (sentence,) = page.texts["h1"]
    assert sentence.startswith("Mode graph is 2.00 times as fast as mode compile over 1 workload (geometric mean 2.00")
    assert sentence.endswith("faster in 1; 1 more cannot be compared.")
    assert "Can these numbers be trusted? With reservations." in page.texts["h2"]
    assert "Encore: run synthetic" in page.texts["title"][0]


def test_every_table_links_to_its_csv(both):
    report, page = both
    links = [attributes["href"] for attributes in page.named("a") if "download" in attributes]
    assert len(links) >= 15
    assert all((report.html.parent / link).is_file() for link in links)
    shown = {attributes["aria-labelledby"] for attributes in page.named("div") if attributes.get("role") == "region"}
    assert {f"tables/{name}.csv" for name in shown - {"published"}} == set(links)


def test_csv_holds_raw_values_where_readers_see_a_sentence(both):
    report, _ = both
    tables = report.html.parent / "tables"
    (row,) = [row for row in csv.DictReader((tables / "overview.csv").open()) if row["workload"] == "EOS"]
    assert float(row["compile_us"]) == 100.0
    assert float(row["eager_low"]) <= float(row["eager_speedup"]) == pytest.approx(0.5, rel=0.05)
    assert row["eager_verdict"] == "SLOW"
    assert row["eager_alternating"] == "True"
    (row,) = [row for row in csv.DictReader((tables / "overview.csv").open()) if row["workload"] == "ST"]
    assert (row["graph_speedup"], row["graph_missing"]) == ("", "crash")
    for path in tables.glob("*.csv"):
        names = next(csv.reader(path.open()))
        assert len(names) == len(set(names)), path.name
        assert " [" not in path.read_text(), f"{path.name} has an interval as text"


@pytest.mark.usefixtures("undrawn")
def test_encores_own_columns_come_first_and_are_set_off(tmp_path):
    cells = [cell("EOS", mode) for mode in ("eager", "compile", "graph", "placement", "indirection")]
    page = page_of(tmp_path, cells)
    headings = page.texts["button"]
    start = headings.index("workload")
    assert headings[start : start + 4] == ["workload", "indirection", "placement", "compile (µs)"]
    own = [attributes for attributes in page.named("th") if "own" in attributes.get("class", "").split()]
    assert len(own) >= 4


@pytest.mark.usefixtures("undrawn")
def test_a_failed_cell_looks_failed_and_no_other_does(tmp_path):
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
def test_the_script_shows_rows_that_have_every_word_and_only_failures_if_asked():
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
    vm.runInNewContext(fs.readFileSync(process.argv[1], "utf8") + "; this.show = showMatching;", context);
    const asked = [["", false], ["eos", false], ["Graph EOS", false], ["", true], ["eos nothing", false]];
    for (const [words, failures] of asked) {
      const said = context.show(words, failures);
      console.log(rows.map(row => row.hidden ? "-" : "x").join(""), table.out, said);
    }
    """
    lines = subprocess.run(["node", "-e", program, script], capture_output=True, text=True, check=True).stdout
    assert lines.splitlines() == [
        "xxx false ",
        "xx- false 2 of 3 rows",
        "x-- false 1 of 3 rows",
        "-xx false 2 of 3 rows",
        "--- true 0 of 3 rows",
    ]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_script_sorts_numbers_and_keeps_missing_values_last(tmp_path):
    script = (build.__file__.rpartition("/")[0]) + "/page/report.js"
    program = """
    const fs = require("fs"), vm = require("vm");
    const document = {querySelectorAll: () => [], getElementById: () => null};
    const context = {document, Number};
    vm.runInNewContext(fs.readFileSync(process.argv[1], "utf8") + "; this.compare = compareCells;", context);
    const cell = (text, sort, missing) => ({textContent: text, dataset: {sort, missing}});
    const cells = [cell("10", "10"), cell("-", undefined, "1"), cell("9", "9"), cell("oom"), cell("1,000", "1000")];
    for (const sign of [1, -1]) {
      console.log(cells.slice().sort((a, b) => context.compare(a, b, sign)).map(c => c.textContent).join(" "));
    }
    """
    lines = subprocess.run(["node", "-e", program, script], capture_output=True, text=True, check=True).stdout
    assert lines.splitlines() == ["9 10 1,000 oom -", "1,000 10 9 oom -"]
