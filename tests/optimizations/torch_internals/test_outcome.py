"""Outcomes of compiled graphs are recorded per thread, and PyTorch's class is unchanged."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from optimizations import torch_internals
from optimizations.report import CompiledGraph, LeftOut
from optimizations.stack_trace import reason_and_frame
from optimizations.torch_internals.outcome import FORWARD_NOT_CAPTURED, NO_CUDA_WORK, SWITCHED_OFF, watched


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PyTorch's method, doing nothing."""
    owner, attribute = torch_internals.holder_of("post_compile")

    def post_compile(graph: Any, inputs: Any, constants: Any, settings: Any) -> str:
        return "done"

    monkeypatch.setattr(owner, attribute, post_compile)
    return post_compile


def _present() -> Any:
    owner, attribute = torch_internals.holder_of("post_compile")
    return vars(owner)[attribute]


def _compile(graph: Any, *, enabled: bool = False) -> Any:
    return _present()(graph, [], None, {"cudagraphs": enabled})


def _graph(name: str) -> Any:
    return SimpleNamespace(
        fx_kwargs={"is_inference": name == "inference"},
        disabled_cudagraphs_reason=name,
        cudagraph_info=None,
        device_types={"cuda"},
        partition_maps=(),
    )


def test_nested_block_records_once_per_thread(stock: Any) -> None:
    outer: list[CompiledGraph] = []
    inner: list[CompiledGraph] = []
    with watched(outer.append):
        with watched(inner.append):
            _compile(_graph("inference"))
        other = threading.Thread(target=lambda: _compile(_graph("elsewhere")))
        other.start()
        other.join(10)
    assert [graph.direction for graph in outer] == ["inference"]
    assert inner == []
    assert _present() is stock


FRAME = 'File "/x/site-packages/mine/net.py", line 12, in forward\n    y = x + self.table\n'
LINE = "/x/site-packages/mine/net.py:12 in forward: y = x + self.table"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (f"skipping cudagraphs due to cpu device (arg3_1). Found from : \n {FRAME}", ("cpu device (arg3_1)", LINE)),
        (f"disabling cudagraphs due to incompatible op aten.x Found from {FRAME}\n",
         ("disabling cudagraphs due to incompatible op aten.x", LINE)),
        ("skipping cudagraphs due to multiple devices: cpu, cuda:0", ("multiple devices: cpu, cuda:0", None)),
        ("complex memory overlap", ("complex memory overlap", None)),
    ],
)  # fmt: skip
def test_messages_of_inductor_are_parsed(message: str, expected: tuple[str, str | None]) -> None:
    reason, frame = reason_and_frame(message)
    assert (reason, None if frame is None else str(frame)) == expected


class Settings(dict[str, Any]):
    """Provide the argument of `post_compile`: `cudagraphs` is read before and after it."""

    def __init__(self, *answers: bool) -> None:
        super().__init__()
        self._answers = list(answers)

    def __getitem__(self, name: str) -> bool:
        assert name == "cudagraphs"
        return self._answers.pop(0)


def noted(
    *, wanted: bool, enabled: bool, backward: bool = False, asked_for: bool = True, **fields: Any
) -> CompiledGraph:
    """The record of a `CompiledFxGraph` with these fields; without any it is captured whole."""
    graph = _graph("")
    for name, value in {"partition_maps": None, "fx_kwargs": {"is_backward": backward}, **fields}.items():
        setattr(graph, name, value)
    found: list[CompiledGraph] = []
    settings = torch_internals.inductor_config.patch({"triton.cudagraphs": asked_for})
    with settings, watched(found.append, every_thread=True):
        _present()(graph, [], None, Settings(wanted, enabled))
    (record,) = found
    return record


def test_each_kind_of_uncaptured_graph_has_a_reason(stock: Any) -> None:
    overlapping = SimpleNamespace(cudagraph_fail_reasons=["complex memory overlap"] * 2)
    cpu_device = f"skipping cudagraphs due to cpu device (a). Found from : \n {FRAME}"
    for fields, expected in [
        ({"wanted": False, "device_types": {"cpu"}}, (LeftOut(NO_CUDA_WORK, None),)),
        ({"wanted": False, "disabled_cudagraphs_reason": cpu_device}, (LeftOut("cpu device (a)", LINE),)),
        ({"wanted": True, "cudagraph_info": overlapping}, (LeftOut("complex memory overlap", None),)),
        ({"wanted": False, "backward": True}, (LeftOut(FORWARD_NOT_CAPTURED, None),)),
        ({"wanted": True, "partition_maps": []}, ()),  # all of it left out, told node by node
    ]:
        record = noted(enabled=False, **fields)
        assert (record.partitions, record.not_captured) == (0, expected)
    assert noted(wanted=False, enabled=False, asked_for=False).not_captured == (LeftOut(SWITCHED_OFF, None),)
