"use strict";
// Sorts a table by the column whose heading is pressed (mouse, Enter or Space). Cells without a value come last either way.
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

for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => sortBy(button));
}
