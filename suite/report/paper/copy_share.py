"""PyGraph Fig. 3: what copying inputs costs in an iteration with CUDA graphs."""

from __future__ import annotations

from suite.modes import INDIRECTION_MODE, PLACEMENT_MODE
from suite.report.chart import Bar, Chart, Scale
from suite.report.paper.exhibit import Exhibit, Made, Results, chart_or_none, labels_of, reasons
from suite.report.table import make_table

_SERIES = "share that indirection takes away"
_DIFFERS = (
    f"Measured is what indirection takes away: the host time of {PLACEMENT_MODE} that {INDIRECTION_MODE} does not "
    "need, in percent, with its 95 % interval; below 0 it costs more than it saves. Published values are GraCE's, "
    "whose text gives the share of copies for two workloads (section 2.3.2)."
)


def make(exhibit: Exhibit, results: Results) -> Made:
    """One bar per workload."""
    labels = labels_of(results, exhibit.source)
    shares = results.published.copy_share_percent["grace"]
    bars: dict[tuple[str, str], Bar] = {}
    rows = []
    for label in labels:
        paper = shares.get(label)
        ratio = results.ratio(label, INDIRECTION_MODE, PLACEMENT_MODE)
        why = results.why_no_ratio(label, INDIRECTION_MODE, PLACEMENT_MODE)
        row: dict[str, object] = {"workload": label, "published_percent": paper, "missing": reasons({_SERIES: why})}
        bars[label, _SERIES] = Bar(failure=why, published=paper)
        if ratio is not None:
            low, share, high = (100 * (1 - 1 / value) for value in (ratio.low or 1e-9, ratio.value, ratio.high))
            row |= {"share_percent": share, "low_percent": low, "high_percent": high}
            drawn = max(share, 0.0)
            bars[label, _SERIES] = Bar(drawn, (max(low, 0.0), max(high, 0.0)), published=paper, label=f"{share:.1f}")
        rows.append(row)
    title = exhibit.title(results.published)
    columns = ["workload", "share_percent", "low_percent", "high_percent", "published_percent", "missing"]
    chart = Chart(
        exhibit.stem,
        title,
        f"% of {PLACEMENT_MODE}'s host time",
        Scale.LINEAR,
        labels,
        (_SERIES,),
        bars,
        published=f"share of copies, {results.published.sources['grace'].setting}",
        note="A negative share (indirection is slower) is written, and has no bar.",
    )
    here, paper_setting = results.provenance(), results.published.sources["grace"].setting
    note = f"Measured: {here.device}, PyTorch {here.torch}. Published: {paper_setting}. {exhibit.differs}"
    table = make_table(exhibit.stem, title, note, columns, rows)
    return Made(table, chart_or_none(chart), results.provenance())


EXHIBITS = (Exhibit("pygraph-fig3", "pygraph", "Fig. 3", "what copying of inputs costs", _DIFFERS, make),)
