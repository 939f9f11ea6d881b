"""How the page looks and behaves: which columns come first, what looks failed, sorting and the filter."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from fixtures.report_pages import few_exhibits, page_of, undrawn  # noqa: F401  # fixtures are used by their names
from fixtures.synthetic_results import cell, failed_cell

from suite.report import build
from suite.results.schema import Status


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
