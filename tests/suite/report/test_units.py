"""Printed numbers: units by the column's name, binary byte units, nothing shown as something."""

from __future__ import annotations

import pytest

from optimizations.byte_units import format_bytes, parse_bytes
from suite.report.page import sort_key
from suite.report.units import NOTHING, format_heading, format_value


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (16, "16 B"), (1023, "1023 B"), (8192, "8.0 KB"), (602112, "588.0 KB"), (3243229184, "3.0 GB")],
)
def test_bytes_are_printed_as_the_papers_print_them(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize("text", ["8.0", "8 kB", "KB", "8 MiB"])
def test_invalid_byte_count_is_refused(text):
    with pytest.raises(ValueError, match=r"byte count|float"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("host_us", 1234.6, "1,235"),
        ("host_us", 12.34567, "12.35"),
        ("kernels", 12345, "12,345"),
        ("copied_bytes", 2048, "2.0 KB"),
        ("coverage_percent", 5.138, "5.14"),
        ("grace_speedup", 1.9, "1.900"),
        ("high", float("inf"), "∞"),
        ("passed", True, "yes"),
        ("blocking", False, "no"),
        ("placeholder_bytes", 0, "0 B"),
        ("placeholder_bytes", None, NOTHING),
        ("host_us", float("nan"), NOTHING),
    ],
)
def test_values_are_printed_by_the_unit_in_the_columns_name(column, value, text):
    assert format_value(column, value) == text


@pytest.mark.parametrize(
    ("column", "heading"),
    [
        ("host_us", "host (µs)"),
        ("eager_published_ms", "eager published (ms)"),
        ("coverage_percent", "coverage (%)"),
        ("cuda_graphs", "CUDA graphs"),
        ("workload", "workload"),
        ("clock_low_mhz", "clock low (MHz)"),
    ],
)
def test_headings_show_the_unit(column, heading):
    assert format_heading(column) == heading


@pytest.mark.parametrize(
    ("value", "key"),
    [(3, "3"), ("1.25 [1.20, 1.30] FAST", "1.25"), ("1,234 of 2", "1234"), ("oom", None), (None, None), (True, None)],
)
def test_cells_sort_by_the_number_they_begin_with(value, key):
    assert sort_key(value) == key
