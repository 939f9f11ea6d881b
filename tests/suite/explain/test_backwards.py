"""Explain reports backward graphs of small programs in training."""

from __future__ import annotations

from typing import Any

import pytest
from capture_programs import FAILS_BACKWARD
from explain_seen import Seen, at, captured

from suite.explain.capture import SETTINGS
from suite.measure.modes import PLACEMENT_MODE

NAMES = (
    "layer_norm",
    "operator_in_backward",
    f"operator_in_backward{FAILS_BACKWARD}",
    "copy_in_backward",
    "sparse_gradient",
    "no_backward",
    "gradient_in_forward",
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    answers: dict[str, Any] = captured(NAMES, tmp_path_factory.mktemp("backwards"))["programs"]
    return {name: Seen(answer) for name, answer in answers.items()}


def test_backward_is_lowered_and_counted_under_each_setting(programs: dict[str, Seen]) -> None:
    graph = programs["layer_norm"].graph
    assert [each.setting for each in graph.backward] == [*SETTINGS, PLACEMENT_MODE]
    for lowering in graph.backward:
        assert (lowering.partitions, lowering.kernels_outside, lowering.not_captured) == (1, 0, [])
    assert graph.stock_captures is True


def test_kernel_reducing_rows_and_columns_is_no_obstacle(
    programs: dict[str, Seen],
) -> None:
    seen = programs["layer_norm"]
    sums = seen.backward_source.count("= workspace_0[")
    assert sums == 2, "of the gradients of weight and bias"
    assert seen.backward("graph").kernels_in_graphs == seen.backward_source.count(".run(") + sums


def test_copy_to_the_gpu_in_the_backward_has_its_line(programs: dict[str, Seen]) -> None:
    seen = programs["copy_in_backward"]
    backward = seen.backward("graph")
    assert (backward.host_to_device_copies, backward.blocking_copies) == (1, 1)
    assert (seen.stock.host_to_device_copies, seen.stock.not_captured) == (0, [])
    (why,) = backward.not_captured
    assert "DeviceCopy" in why.reason
    assert why.source_line is not None
    assert why.source_line.startswith(at("scale.to(gradient.device)"))


def test_backward_of_an_uncaptured_forward_is_not_captured(programs: dict[str, Seen]) -> None:
    seen = programs["copy_in_backward"]
    forward, backward = seen.unpartitioned, seen.backward("graph-unpartitioned")
    assert (forward.partitions, backward.partitions, backward.kernels_outside) == (0, 0, 2)
    assert [why.reason for why in backward.not_captured] == ["backward of a graph that was not captured"]


def test_backward_may_be_uncaptured_after_a_captured_forward(programs: dict[str, Seen]) -> None:
    seen = programs["sparse_gradient"]
    assert (seen.stock.kernels_in_graphs, seen.stock.kernels_outside) == (1, 0)
    assert [each.setting for each in seen.graph.backward] == [*SETTINGS, PLACEMENT_MODE]
    backward = seen.backward("graph")
    assert (backward.partitions, backward.kernels_in_graphs, backward.kernels_outside) == (0, 0, 1)
    assert [why.reason for why in backward.not_captured] != []
    assert seen.graph.stock_captures is False


def test_programs_own_differentiation_is_lowered(programs: dict[str, Seen]) -> None:
    seen = programs["gradient_in_forward"]
    assert seen.stock.kernels_in_graphs == 1
    assert "tl_math.cos(" in seen.source


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"operator_in_backward{FAILS_BACKWARD}", "NotImplementedError: a backward that Inductor cannot lower"),
        ("no_backward", "RuntimeError: "),
    ],
    ids=["Inductor fails", "cannot be differentiated"],
)
def test_backward_that_cannot_be_lowered_keeps_the_forward(programs: dict[str, Seen], name: str, reason: str) -> None:
    seen = programs[name]
    assert seen.failure is None
    (limit,) = (limit for limit in seen.limits if limit.startswith("the backward of graph 0 was not lowered"))
    assert limit.partition(" for ")[2].startswith(f"{', '.join([*SETTINGS, PLACEMENT_MODE])}: ")
    assert reason in limit
    assert seen.graph.backward == []
    assert [each.kernels_in_graphs for each in seen.graph.lowerings] == [2, 2, 2]
    assert seen.graph.stock_captures is None, "that of the backward is not known"
