"""Published numbers: complete, sourced, and set only next to what they belong to."""

from __future__ import annotations

import json

import pytest

from suite.report.published import PUBLISHED_PATH, load_published
from suite.results.errors import EncoreError


@pytest.fixture(scope="module")
def published():
    return load_published()


def test_papers_tables_are_complete(published):
    assert len(published.bytes_copied["grace"]) == 25
    assert len(published.coverage_percent["grace"]) == len(published.coverage_percent["pygraph"]) == 6


@pytest.mark.parametrize(
    ("workload", "mode", "baseline", "speedup"),
    [
        ("EOS", "graph", "compile", 0.71),
        ("EOS", "graph-unpartitioned", "compile", 0.71),
        ("DALLE2", "encore", "compile", 2.72),
        ("ST", "placement", "graph", 2.0),
        ("TKE", "indirection", "placement", 1.23),
        ("EOS", "encore", "compile", None),
        ("ALNET", "graph", "compile", None),
    ],
)
def test_speedups_are_next_to_the_same_comparison(published, workload, mode, baseline, speedup):
    assert published.speedup("grace", workload, mode, baseline) == speedup


def test_wrong_fields_are_refused(tmp_path):
    changed = json.loads(PUBLISHED_PATH.read_text()) | {"surprise": 1}
    wrong = tmp_path / "published.json"
    wrong.write_text(json.dumps(changed))
    with pytest.raises(EncoreError, match="surprise"):
        load_published(wrong)
