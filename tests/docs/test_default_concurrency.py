"""Pages say what the default of the option `concurrency` is. Whoever changes it changes these, too."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import optimizations
from optimizations.options import CONCURRENCY, Options

ROOT = Path(__file__).parents[2]
SAID = {
    "README.md": "side by side**: independent",
    "docs/capture.md": '| `concurrency` | `"auto"` |',
    "docs/callables.md": '| `concurrency` | `"auto"` |',
    "docs/concurrency.md": '# the default is "auto"',
    "CHANGELOG.md": 'on unless `options={"concurrency": "off"}`',
}
"""What each page says where it is "auto"."""


@pytest.mark.parametrize("page", SAID)
def test_page_says_what_the_default_is(page: str) -> None:
    assert CONCURRENCY == "auto" and SAID[page] in (ROOT / page).read_text(encoding="utf-8")


def test_graphs_steps_and_callables_have_one_default() -> None:
    assert Options().concurrency == CONCURRENCY
    for function in (optimizations.graph_step, optimizations.graph_callables):
        assert inspect.signature(function).parameters["concurrency"].default == CONCURRENCY
