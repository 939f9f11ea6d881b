"use strict";
// Sorts a table by the column whose heading is pressed (mouse, Enter or Space), and shows only the rows that have every
// word of the filter. Cells without a value come last either way.
function compareCells(a, b, sign) {
  const x = a.dataset.sort, y = b.dataset.sort;
  if (a.dataset.missing || b.dataset.missing) {
    return (a.dataset.missing ? 1 : 0) - (b.dataset.missing ? 1 : 0);
  }
  if (x !== undefined && y !== undefined) return sign * (Number(x) - Number(y));
  if (x !== undefined) return -1;
  if (y !== undefined) return 1;
  return sign * a.textContent.localeCompare(b.textContent);
}

function sortBy(button) {
  const heading = button.closest("th");
  const body = heading.closest("table").tBodies[0];
  const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const rows = Array.from(body.rows);
  rows.sort((a, b) => compareCells(a.cells[heading.cellIndex], b.cells[heading.cellIndex], sign));
  for (const other of heading.parentNode.cells) other.setAttribute("aria-sort", "none");
  heading.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
  body.append(...rows);
}

function matches(text, filter) {
  const found = text.toLowerCase();
  return filter.toLowerCase().split(/\s+/).every(word => found.includes(word));
}

function showMatching(filter, onlyFailed) {
  let shown = 0, all = 0;
  for (const table of document.querySelectorAll("table")) {
    let left = 0;
    for (const row of table.tBodies[0].rows) {
      const text = Array.from(row.cells, cell => cell.textContent).join(" ");
      const failed = row.classList.contains("failed") || row.querySelector("td.failure") !== null;
      row.hidden = !matches(text, filter) || (onlyFailed && !failed);
      left += row.hidden ? 0 : 1;
    }
    all += table.tBodies[0].rows.length;
    shown += left;
    table.classList.toggle("filtered-out", left === 0);
  }
  return shown === all ? "" : `${shown} of ${all} rows`;
}

for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => sortBy(button));
}

const words = document.getElementById("filter"), failures = document.getElementById("only-failed");
if (words !== null) {
  const update = () => {
    document.getElementById("filter-count").textContent = showMatching(words.value.trim(), failures.checked);
  };
  words.addEventListener("input", update);
  failures.addEventListener("change", update);
  document.getElementById("filter-form").hidden = false;  // without scripts there is nothing to filter with
}
