"""Figures: what the bars are made of, that they are drawn at their values, and that they are legible and honest."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from fixtures.synthetic_results import cell, environment, timed
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from recorded_runs import joined

from suite.measure.modes import MODES
from suite.report import charts
from suite.report.chart import Bar, Chart, LineChart, Scale, colour, draw, to_png, to_svg
from suite.report.paper import Results
from suite.report.provenance import Provenance, RunRows
from suite.report.published import load_published
from suite.report.runs import Run

PUBLISHED = load_published()
ORIGIN = Provenance("SYNTHETIC GPU", "0.0", (RunRows("synthetic", "0123456789", None, None),))


def charts_of(*cells):
    return {chart.name: chart for chart in charts.of_run(Results(PUBLISHED, Run(environment(), cells)))}


def chart_of(bars, scale=Scale.LINEAR, **changes):
    groups, series = (tuple(dict.fromkeys(key[place] for key in bars)) for place in (0, 1))
    return Chart("test", "Title", "axis", scale, groups, series, bars, **changes)


def heights(figure):
    """(bottom, top) of every bar drawn."""
    return [(patch.get_y(), patch.get_y() + patch.get_height()) for axes in figure.axes for patch in axes.patches]


def texts(figure):
    return " ".join(
        item.get_text() for axes in figure.axes for item in (*axes.texts, *axes.get_xticklabels(), axes.title)
    ) + (figure._suptitle.get_text() if figure._suptitle else "")


def test_speed_up_bars_are_ratios_with_intervals_and_geomean():
    graph = cell("DR-I", "graph", **timed(50, 50, 50))
    chart = charts_of(cell("DR-I", "compile"), graph, cell("EOS", "compile"))["over_compile"]
    bar = chart.bars["DR-I", "graph"]
    assert bar.value == pytest.approx(2.0)
    assert bar.interval == pytest.approx((2.0, 2.0))
    assert bar.published == 0.85
    assert chart.bars["EOS", "graph"].failure is None, "it was not run there"
    assert chart.bars["geomean", "graph"].value == pytest.approx(2.0)
    assert "the 1 workloads that all modes have" in chart.note
    assert chart.series == ("graph",)


def test_speed_ups_of_each_group_have_figures_of_their_own():
    """GraCE's workloads, others, training with the optimizer, and several GPUs are different subjects."""
    rows = (("EOS", {}), ("MINE", {}), ("DCGAN", {"with_optimizer": True}), ("ST@tp2", {"tp": 2}))
    cells = [
        cell(name, mode, 100.0 / factor, **changes)
        for name, changes in rows
        for mode, factor in (("compile", 1), ("graph", 2), ("encore", 4))
    ]
    found = charts_of(*cells)
    groups = {name: chart.groups for name, chart in found.items() if name.startswith("over_")}
    assert groups == {
        f"{stem}{suffix}": (label,) if suffix == "_gpus" else (label, "geomean")
        for stem in ("over_graph", "over_compile")
        for suffix, label in (
            ("", "EOS"), ("_others", "MINE"), ("_optimizer", "DCGAN (with optimizer)"), ("_gpus", "ST@tp2"),
        )
    }  # fmt: skip
    assert found["over_graph"].series == ("encore",) and found["over_compile"].series == ("graph", "encore")
    texts_of = [tick.get_text() for tick in draw(found["over_graph_optimizer"], ORIGIN).axes[0].get_xticklabels()]
    assert texts_of == ["DCGAN", "geomean"]


def test_bars_that_are_not_decided_are_pale():
    cells = cell("EOS", "compile"), cell("EOS", "graph", 50.0), cell("EOS", "placement", **timed(80, 99, 120))
    chart = charts_of(*cells)["over_compile"]
    assert [chart.bars["EOS", mode].undecided for mode in ("graph", "placement")] == [False, True]
    bars = chart_of({("a", "graph"): Bar(2.0), ("a", "placement"): Bar(2.0, undecided=True)}, Scale.RATIO)
    figure = draw(bars, ORIGIN)
    assert [patch.get_facecolor()[3] for patch in figure.axes[0].patches] == [1.0, 0.3]
    assert "no verdict" in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(
    ("scale", "shown", "bar", "text", "drawn"),
    [
        (Scale.RATIO, (0.125, 8), Bar(0.04, (0.03, 0.05)), "0.04\N{MULTIPLICATION SIGN}", [(1.0, 0.125)]),
        (Scale.RATIO, (0.125, 8), Bar(32.0), "32.00\N{MULTIPLICATION SIGN}", [(1.0, 8.0)]),
        (Scale.LINEAR, (0, 200), Bar(2301.0), "2,301", [(0.0, 200.0)]),
    ],
)
def test_bar_that_dwarfs_the_others_is_cut_with_its_value(scale, shown, bar, text, drawn):
    figure = draw(chart_of({("a", "graph"): bar}, scale, shown=shown), ORIGIN)
    (axes,) = figure.axes
    assert heights(figure) == drawn
    assert [item.get_text() for item in axes.texts] == [text]
    low, high = axes.get_ylim()
    assert low > shown[0] / 2 and high < shown[1] * 2 if scale is Scale.RATIO else high < shown[1] * 1.1
    assert "are cut" in " ".join(chart_of({("a", "graph"): bar}, scale, shown=shown).caption)


@pytest.mark.parametrize("values", [(0.04, 4.4), (0.3, 4.4), (0.9, 1.1), (0.02, 90.0)])
def test_tick_is_near_both_ends_of_a_ratio_axis(values):
    bars = {(str(value), "graph"): Bar(value) for value in values}
    (axes,) = draw(chart_of(bars, Scale.RATIO, shown=(0.125, 128)), ORIGIN).axes
    low, high = axes.get_ylim()
    assert min(axes.get_yticks()) < 2 * low and max(axes.get_yticks()) > high / 2


def test_failed_cell_has_a_colour_of_its_own():
    def box_of(failure):
        (axis,) = draw(chart_of({("a", "placement"): Bar(failure=failure), ("a", "graph"): Bar(1.0)}), ORIGIN).axes
        (text,) = [text for text in axis.texts if failure in text.get_text().replace("\n", " ")]
        return text.get_text(), to_hex(text.get_bbox_patch().get_facecolor())

    mode = colour(chart_of({("a", "placement"): Bar(1.0)}), "placement").lower()
    told, red = box_of("fail_accuracy")
    without, grey = box_of("compile: not run")
    assert told == "\N{BALLOT X} fail_accuracy" and without == "compile:\nnot run"
    assert len({mode, red, grey}) == 3
    assert box_of("compile: oom")[1] == red, "the baseline failed"


def test_zero_bytes_are_marked_and_ticks_are_binary():
    (axes,) = draw(chart_of({("a", "graph"): Bar(0.0), ("b", "graph"): Bar(2.0**30)}, Scale.BYTES), ORIGIN).axes
    assert [item.get_text() for item in axes.texts] == ["0"]
    labels = [axes.yaxis.get_major_formatter()(tick, 0) for tick in axes.get_yticks()]
    assert {"1 B", "1 KB", "1 MB", "1 GB"} <= set(labels)


def test_title_has_the_warning_the_card_and_the_number_of_runs():
    smoke = replace(ORIGIN, warning="SMOKE RUN on the CPU: these numbers say nothing")
    figure = draw(chart_of({("a", "graph"): Bar(1.0)}), smoke)
    assert figure._suptitle.get_text().splitlines() == [
        "SMOKE RUN on the CPU: these numbers say nothing",
        "Title",
        "SYNTHETIC GPU, PyTorch 0.0, 1 run",
    ]


def test_published_marks_are_drawn_only_where_there_are_some():
    marked = chart_of({("a", "graph"): Bar(1.0, published=3.0)}, published="GraCE: H100")
    with_mark = draw(marked, ORIGIN)
    without = draw(chart_of({("a", "graph"): Bar(1.0)}, published="GraCE: H100"), ORIGIN)
    assert [3.0] in [list(line.get_ydata()) for line in with_mark.axes[0].lines]
    assert "published" in [text.get_text() for text in with_mark.legends[0].get_texts()]
    assert marked.caption == ("Published: GraCE: H100.",)
    assert "published" not in [text.get_text() for text in without.legends[0].get_texts()]


def test_workloads_in_many_modes_do_not_overlap():
    groups, series = [f"W{number}" for number in range(13)], ("eager", "compile", "graph", "placement", "encore")
    figure = draw(chart_of({(group, mode): Bar(50.0) for group in groups for mode in series}), ORIGIN)
    figure.draw_without_rendering()
    for axes in figure.axes:
        edges = sorted({(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axes.patches})
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(edges))
    boxes = [label.get_window_extent() for label in figure.axes[-1].get_xticklabels()]
    legend = figure.legends[0].get_window_extent()
    assert all(box.y0 > legend.y1 for box in boxes)
    assert legend.y0 >= 0 and legend.x0 >= 0 and legend.x1 <= figure.bbox.x1


def test_text_of_a_wide_figure_is_legible_at_a_thousand_pixels():
    """Where a page shows it so wide, the smallest letters are ten pixels high."""
    for chart in charts.of_run(Results(PUBLISHED, joined()))[:2]:
        figure = draw(chart, ORIGIN)
        sizes = [
            text.get_fontsize()
            for axes in figure.axes
            for text in (*axes.texts, *axes.get_xticklabels(), axes.yaxis.label)
        ]
        assert min(sizes) * 1000 / (72 * figure.get_figwidth()) >= 10, chart.name


def test_modes_have_colours_of_their_own_in_every_figure():
    modes = tuple(MODES)
    every = chart_of({("a", mode): Bar(1.0) for mode in modes})
    some = chart_of({("a", mode): Bar(1.0) for mode in reversed(modes[2:])})
    assert len({colour(every, mode) for mode in modes}) == len(modes)
    assert all(colour(every, mode) == colour(some, mode) for mode in modes[2:])


def test_same_chart_gives_the_same_files():
    """Coordinates of the SVG are cut to a tenth of a point; values and versions are not coordinates."""
    origin = Provenance("GPU", "2.11.0+cu130")
    bar = Bar(1.234, (1.2, 1.3), published=1.0, label="1.234")
    chart = chart_of({("a", "graph"): bar}, Scale.RATIO, published="P")
    first, second = ([to_png(f), to_svg(f, "x")] for f in (draw(chart, origin), draw(chart, origin)))
    assert first == second
    assert first[0].startswith(b"\x89PNG")
    assert all(text in first[1] for text in (">1.234<", "PyTorch 2.11.0+cu130", "0.85\N{MULTIPLICATION SIGN}"))


def test_svg_is_well_formed_and_keeps_names_inert():
    hostile = '</text><script>alert("$x$")</script>-->'
    svg = to_svg(draw(chart_of({(hostile, hostile): Bar(1.0)}), ORIGIN), "speed")
    root = ElementTree.fromstring(svg)
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert "script" not in tags
    assert "currentColor" in svg
    assert all(element.get("id", "speed-").startswith("speed-") for element in root.iter())
    assert "alert(" in svg and "<script" not in svg


@pytest.mark.parametrize(
    ("scale", "bar", "text"),
    [
        (Scale.PERCENT, Bar(10.3, published=20, label="3 of 29"), "3 of 29"),
        (Scale.PERCENT, Bar(0.0, published=1.3), "0"),
        (Scale.PERCENT, Bar(0.0, published=0.0), "0"),
        (Scale.RATIO, Bar(failure="not measured", published=1.2), "not measured"),
        (Scale.RATIO, Bar(1.0, published=1.3, label="1.00"), "1.00"),
    ],
)
def test_marks_do_not_overlap_labels_of_bars(scale: Scale, bar: Bar, text: str):
    other = Bar(100.0 if scale is Scale.PERCENT else 4.3)
    (axis,) = draw(chart_of({("A", "x"): bar, ("A", "y"): other}, scale), ORIGIN).axes
    (box,) = (label.get_window_extent() for label in axis.texts if label.get_text() == text)
    assert bar.published is not None and axis.transData.inverted().transform((0, box.y0))[1] > bar.published


def test_axis_name_fits_the_height_of_its_panel():
    name = "times graph-unpartitioned's seconds (lower is better)"
    bars = {(f"W{number}", "x"): Bar(1.2) for number in range(20)}
    figure = draw(replace(chart_of(bars, Scale.RATIO), axis=name), ORIGIN)
    assert len(figure.axes) == 2
    for axis in figure.axes:
        assert axis.yaxis.label.get_text().replace("\n", " ") == name
        assert axis.yaxis.label.get_window_extent().height <= axis.get_window_extent().height


def test_long_failure_lies_inside_of_the_axis():
    reason = "graph: compile_error"
    (axis,) = draw(chart_of({("a", "x"): Bar(1.1), ("b", "x"): Bar(failure=reason)}, Scale.RATIO), ORIGIN).axes
    renderer = FigureCanvasAgg(axis.get_figure()).get_renderer()
    (text,) = axis.texts
    assert text.get_window_extent(renderer).y1 <= axis.get_window_extent(renderer).y1


def test_reason_shared_by_a_group_is_written_once() -> None:
    oom = Bar(failure="oom")
    figure = draw(chart_of({("A", "x"): oom, ("A", "y"): oom, ("B", "x"): Bar(2), ("B", "y"): oom}), ORIGIN)
    assert [text.get_text() for text in figure.axes[0].texts] == ["\N{BALLOT X} oom"] * 2


def test_lines_are_in_the_legend_and_ratios_logarithmic() -> None:
    steps = LineChart(
        "test", "Title", "x", "y", {"graph": ((1, 0), (2, 100))}, shares=True, published=((1, 25, "published"),),
    )  # fmt: skip
    figure = draw(steps, ORIGIN)
    assert [text.get_text() for text in figure.axes[0].texts] == ["no change"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["graph", "published"]
    assert figure.axes[0].get_xscale() == "log" and figure.axes[0].get_ylim() == (0, 103)
