"""Verdicts for tests of the store. Imports no torch: processes that only write are quick to start."""

from __future__ import annotations

from typing import Any

from optimizations.selection.verdict import Circumstances, Compared, StoredVerdict

GRAPH, OTHER = "a" * 64, "b" * 64


def where(graph: str = GRAPH, **changes: Any) -> Circumstances:
    known: dict[str, Any] = {
        "graph": graph,
        "options": "indirection=auto",
        "objective": "latency",
        "gpu": "NVIDIA H100, 80 GB",
        "driver": "580.159",
        "host": "a processor",
        "torch": "2.11.0",
        "encore": "0.1.0+1234",
        "moving": True,
    }
    return Circumstances.model_validate({**known, **changes})


def verdict(circumstances: Circumstances | None = None, **changes: Any) -> StoredVerdict:
    chosen = circumstances or where()
    known: dict[str, Any] = {
        "circumstances": chosen,
        "group": (chosen.graph,),
        "candidates": ("none", "copy", "indirection"),
        "kept": "copy",
        "outcome": "faster",
        "compared": (
            Compared(candidate="none", ratio=1.5, low=1.4, high=1.6, rounds=12),
            Compared(candidate="indirection", ratio=1.0, low=None, high=1.01, rounds=12),
        ),
        "median_s": {"none": 150e-6, "copy": 100e-6, "indirection": 100.5e-6},
        "leads": True,
        "calls": 156,
        "measuring_s": 0.02,
        "excess_s": 0.004,
        "rounds": 12,
        "ended_by": "certainty",
        "measured_at": "2026-01-02T03:04:05Z",
        "direction": "inference",
    }
    return StoredVerdict(**{**known, **changes})
