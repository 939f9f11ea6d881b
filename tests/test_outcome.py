"""What becomes of compiled graphs is noted per thread, and PyTorch's class is left as it was."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from optimizations import torch_internals
from optimizations.report import CompiledGraph
from optimizations.torch_internals.outcome import watched


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PyTorch's method, doing nothing."""
    owner, attribute = torch_internals.place("post_compile")

    def post_compile(graph: Any) -> str:
        return "done"

    monkeypatch.setattr(owner, attribute, post_compile)
    return post_compile


def _present() -> Any:
    owner, attribute = torch_internals.place("post_compile")
    return vars(owner)[attribute]


def _graph(name: str) -> Any:
    return SimpleNamespace(
        fx_kwargs={"is_inference": name == "inference"},
        disabled_cudagraphs_reason=name,
        cudagraph_info=None,
        device_types={"cuda"},
        partition_maps=(),
    )


def test_threads_that_end_in_any_order_leave_no_wrapper_and_note_their_own_graphs(stock: Any) -> None:
    noted: dict[str, list[CompiledGraph]] = {"first": [], "second": []}
    second_began, first_ended = threading.Event(), threading.Event()

    def first() -> None:
        with watched(noted["first"].append):
            assert second_began.wait(10)
            assert _present()(_graph("of the first")) == "done"
        first_ended.set()

    def second() -> None:
        while _present() is stock:
            pass
        with watched(noted["second"].append):
            second_began.set()
            assert first_ended.wait(10)
            assert _present() is not stock
            _present()(_graph("of the second"))

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert _present() is stock
    assert {name: [graph.not_captured for graph in graphs] for name, graphs in noted.items()} == {
        "first": [("of the first",)],
        "second": [("of the second",)],
    }


def test_a_block_within_a_block_notes_once_and_other_threads_are_not_noted(stock: Any) -> None:
    outer: list[CompiledGraph] = []
    inner: list[CompiledGraph] = []
    with watched(outer.append):
        with watched(inner.append):
            _present()(_graph("inference"))
        other = threading.Thread(target=lambda: _present()(_graph("elsewhere")))
        other.start()
        other.join(10)
    assert [graph.direction for graph in outer] == ["inference"]
    assert inner == []
    assert _present() is stock
