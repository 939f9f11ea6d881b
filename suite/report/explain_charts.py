"""The figures of `encore explain`'s results, as charts."""

from __future__ import annotations

from collections.abc import Sequence

from suite.explain.records import Explanation
from suite.modes import GRAPH_MODE
from suite.report.chart import Bar, Chart, Scale
from suite.report.explain_tables import (
    explanation_label,
    host_to_device,
    is_as_published,
    lowerings_of,
    settings,
    total_bytes,
)
from suite.report.published import Published

NAMES = ("explain_kernels", "explain_bytes")
NOT_LOWERED = "not lowered"


def all_charts(explanations: Sequence[Explanation], published: Published) -> tuple[Chart, ...]:
    """Every figure these explanations have values for."""
    charts = (kernels_in_graphs(explanations, published), copied_bytes(explanations, published))
    return tuple(chart for chart in charts if any(bar.value is not None for bar in chart.bars.values()))


def kernels_in_graphs(explanations: Sequence[Explanation], published: Published) -> Chart:
    """Share of a model's kernels that would be inside CUDA graphs, per lowering setting, next to published coverage."""
    names = settings(explanations)
    bars: dict[tuple[str, str], Bar] = {}
    for explanation in explanations:
        for setting in names:
            parts = lowerings_of(explanation, setting)
            inside = sum(one.kernels_in_graphs for one in parts)
            kernels = inside + sum(one.kernels_outside for one in parts)
            paper = published.coverage("grace", explanation.target, setting) if is_as_published(explanation) else None
            bar = Bar(100 * inside / kernels, total=100.0, published=paper) if kernels else Bar(None, published=paper)
            if not parts:
                bar = Bar(failure="failed" if explanation.error else NOT_LOWERED, published=paper)
            bars[explanation_label(explanation), setting] = bar
    labels = [explanation_label(explanation) for explanation in explanations]
    whole = [label for label in labels if all(bars[label, name].value == 100 for name in names)]
    if len(whole) == len(labels):  # then that is what there is to see
        whole = []
    note = "What runs between FX graphs, after a graph break, is not seen here; a measured coverage counts it."
    if whole:
        note += f" All kernels are inside in each setting, and left out here: {', '.join(whole)}."
    return Chart(
        "explain_kernels",
        "Kernels inside and outside CUDA graphs, by offline lowering",
        "% of kernels in FX graphs",
        Scale.PERCENT,
        tuple(label for label in labels if label not in whole),
        names,
        {key: bar for key, bar in bars.items() if key[0] not in whole},
        parts=("in CUDA graphs", "outside"),
        published=f"measured coverage, {published.sources['grace'].setting}",
        note=note,
    )


def copied_bytes(explanations: Sequence[Explanation], published: Published) -> Chart:
    """Bytes per call that stock would copy into placeholders, next to published ones, and from host to device."""
    inputs, transfers = "non-static inputs", "host to device"
    bars: dict[tuple[str, str], Bar] = {}
    for explanation in explanations:
        label = explanation_label(explanation)
        if explanation.error and not explanation.graphs:
            bars[label, inputs] = bars[label, transfers] = Bar(failure="failed")
            continue
        transferred = total_bytes(host_to_device(explanation))
        paper = (
            published.copied_bytes("grace", explanation.target, GRAPH_MODE) if is_as_published(explanation) else None
        )
        copied = sum(graph.non_static_input_bytes for graph in explanation.graphs)
        bars[label, inputs] = Bar(float(copied), published=paper)
        bars[label, transfers] = Bar(failure="size unknown") if transferred is None else Bar(float(transferred))
    return Chart(
        "explain_bytes",
        "Bytes that one call copies under stock CUDA graphs, from the FX graphs",
        "bytes per call",
        Scale.BYTES,
        tuple(explanation_label(explanation) for explanation in explanations),
        (inputs, transfers),
        bars,
        published=f"copied before indirection, {published.sources['grace'].setting}",
        note="Non-static inputs are copied into placeholders before each replay, if the graph is captured at all. "
        "Training: of forward graphs alone, while published values count backward graphs too.",
    )
