"""Explain reports the obstacle of each small program, from FX graphs and offline lowering for an H100.

All programs are explained once (`explain_seen`).
"""

from __future__ import annotations

from collections import Counter

import pytest
from explain_programs import WIDTH
from explain_seen import Seen, at, explained

from suite.explain.records import Lowering

BATCH = 8
FLOAT_BYTES = 4
ONE_GRAPH = {
    # What comes with each call or is made in it, the copies, whether stock captures it, and what each setting makes of
    # it: partitions, kernels in graphs and outside, CPU kernels, host-to-device copies, blocking ones; and reasons.
    "mask_attribute": (
        ["attribute self.mask"], [("copy", True, BATCH * WIDTH * FLOAT_BYTES)], True,
        {
            "graph": ((1, 2, 0, 0, 1, 1), ["DeviceCopy ops"]),
            "graph-unpartitioned": ((0, 0, 2, 0, 1, 1), ["cpu device"]),
            "placement": ((1, 2, 0, 0, 0, 0), []),
        },
    ),
    "numpy_scalar": (  # the scalars are packed by a CPU kernel
        ["attribute self.temperature"], [("scalar", False, 8)], False,
        {
            "graph": ((1, 2, 0, 1, 1, 0), ["cpu ops", "DeviceCopy ops"]),
            "graph-unpartitioned": ((0, 0, 2, 0, 0, 0), ["cpu device"]),
            "placement": ((1, 2, 0, 0, 0, 0), []),
        },
    ),
    "staged_argument": (
        ["argument x"], [("copy", True, BATCH * WIDTH * FLOAT_BYTES)], True,
        {"graph": ((1, 2, 0, 0, 1, 1), ["DeviceCopy ops"]), "placement": ((1, 2, 0, 0, 1, 0), [])},
    ),
    "cpu_output": (
        ["attribute self.table", "computed sin"], [], False,
        {"graph": ((1, 1, 0, 1, 0, 0), ["cpu ops"]), "graph-unpartitioned": ((0, 0, 1, 1, 0, 0), ["cpu device"])},
    ),
    "cpu_index": (
        ["attribute self.rows"], [("implicit", True, 3 * 8)], None, {"placement": ((1, 1, 0, 0, 0, 0), [])},
    ),
    "mutated_cpu_state": (
        ["attribute self.calls", "computed add_"], [], False,
        {name: ((1, 1, 0, 1, 0, 0), ["cpu ops"]) for name in ("graph", "placement")},
    ),
    "constructor_chain": (
        ["constant arange", "computed mul", "computed sin"], [("copy", True, WIDTH * FLOAT_BYTES)], True,
        {name: ((1, 1, 0, 0, 0, 0), []) for name in ("graph", "graph-unpartitioned", "placement")},
    ),
    "mutated_input": (
        [], [], False, {name: ((0, 0, 1, 0, 0, 0), ["mutated inputs"]) for name in ("graph", "graph-unpartitioned")},
    ),
}  # fmt: skip
NAMES = (
    *ONE_GRAPH,
    "cpu_autocast",
    "lengths_read_by_host",
    "weight_read_by_host",
    "attention_bf16",
    "attention_bf16_masked",
    "attention_bf16_permuted_mask",
    "attention_fp32",
    "attention_fp64",
    "gradient_in_forward",
    "repeats",
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    return explained(tmp_path_factory.mktemp("explain"), *NAMES)


@pytest.fixture
def seen(request: pytest.FixtureRequest, answers: dict[str, Seen]) -> Seen:
    """Return the program of a test: its name between `test_` and `__`."""
    name = request.function.__name__.removeprefix("test_").partition("__")[0]
    return answers[name]


def work(lowering: Lowering) -> tuple[int, ...]:
    kernels = (lowering.partitions, lowering.kernels_in_graphs, lowering.kernels_outside, lowering.cpu_kernels)
    return (*kernels, lowering.host_to_device_copies, lowering.blocking_copies)


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_cpu_values_copies_and_graphs_are_those_of_the_program(answers: dict[str, Seen], name: str) -> None:
    nodes, copies, captures, settings = ONE_GRAPH[name]
    seen = answers[name]
    placement = seen.graph.placement
    assert [f"{node.kind} {node.operation}" for node in placement.cpu_nodes_before] == nodes
    assert [(copy.kind, copy.blocking, copy.copied_bytes) for copy in placement.copies_before] == copies
    assert seen.graph.stock_captures is captures
    for setting, (expected, reasons) in settings.items():
        lowering = seen.lowering(setting)
        assert work(lowering) == expected, setting
        found = [why.reason for why in lowering.not_captured]
        assert [why.partition(" (")[0] for why in found] == reasons, setting


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("mask_attribute", "self.mask.to(x.device)"),
        ("mutated_cpu_state", "self.calls.add_(1)"),
        ("mutated_input", "x.add_(1)"),
    ],
)
def test_what_is_not_captured_has_its_line(answers: dict[str, Seen], name: str, line: str) -> None:
    seen = answers[name]
    lines = [why.source_line for lowering in (seen.stock, seen.unpartitioned) for why in lowering.not_captured[:1]]
    if name == "mask_attribute":
        placement = seen.graph.placement
        lines += [one.source_line for one in (*placement.cpu_nodes_before, *placement.copies_before)]
        lines += [one.source_line for one in placement.hoisted]
    assert [(one or "").startswith(at(line)) for one in lines] == [True] * len(lines)


def test_cpu_autocast__is_not_analysed_and_says_so(seen: Seen) -> None:
    assert (seen.graph.placement.cpu_nodes_before, seen.graph.placement.copies_before) == ((), ())
    (limit,) = (limit for limit in seen.explanation.limits if "where its values live is not known" in limit)
    assert limit.endswith("the graph switches autocast on the CPU on and off")


def test_gradient_in_forward__is_not_lowered(seen: Seen) -> None:
    assert (seen.graph.lowerings, seen.graph.stock_captures) == ([], None)
    assert any(
        limit.startswith("graph 0 was not lowered for graph: gradients inside") for limit in seen.explanation.limits
    )


def test_cpu_index__is_a_limit_with_its_line(seen: Seen) -> None:
    (limit,) = (limit for limit in seen.explanation.limits if "CPU tensor" in limit)
    assert at("[self.rows]") in limit


def test_lengths_read_by_host__break_the_graph(seen: Seen) -> None:
    assert seen.explanation.error is None
    assert len(seen.explanation.graphs) == 2
    reasons = Counter(each.reason.partition(";")[0] for each in seen.explanation.breaks)
    assert any("item()" in reason for reason in reasons)
    assert reasons["Dynamic shape operator"] == 1
    left = [each for each in seen.explanation.breaks if "mask itself runs without graphs" in each.reason]
    assert [str(each.source_line).startswith(at("lengths[row] :] = 0")) for each in left] == [True]
    assert not any("comes after it is not seen" in limit for limit in seen.explanation.limits)


def test_weight_read_by_host__ends_the_analysis(seen: Seen) -> None:
    assert seen.graph.stock_captures is True
    (limit,) = (limit for limit in seen.explanation.limits if "comes after it is not seen" in limit)
    assert at("if y.sum() > 0:") in limit


@pytest.mark.parametrize(
    ("name", "launches"), [("attention_bf16", 1), ("attention_bf16_masked", 2), ("attention_fp32", 1)]
)
def test_attention_is_one_kernel_marked_as_assumed(answers: dict[str, Seen], name: str, launches: int) -> None:
    seen = answers[name]
    assert "torch.ops.aten._scaled_dot_product_efficient_attention.default(" in seen.source
    assert seen.stock.kernels_in_graphs == launches
    assert any("fused kernel" in limit for limit in seen.explanation.limits)


@pytest.mark.parametrize("name", ["attention_bf16_permuted_mask", "attention_fp64"])
def test_attention_has_no_fused_kernel_for_this_mask_and_dtype(answers: dict[str, Seen], name: str) -> None:
    seen = answers[name]
    assert "torch.ops.aten._scaled_dot_product_" not in seen.source
    assert seen.source.count("extern_kernels.bmm(") == 2
    assert not any("fused kernel" in limit for limit in seen.explanation.limits)


def test_repeats__is_counted_once_with_its_repetitions(seen: Seen) -> None:
    assert seen.explanation.error is None and len(seen.explanation.graphs) == 2
    assert [limit for limit in seen.explanation.limits if "counted once" in limit] == [
        "graph 0 runs 3 times in the call, and is counted once",
        "graph 1 runs 3 times in the call, and is counted once",
    ]


# After placement: the setting "placement", and what the graph's record says of it.


def test_staged_argument__is_moved_by_one_copy(seen: Seen) -> None:
    assert len(seen.graph.placement.staged) == 1
    assert [copy.blocking for copy in seen.graph.placement.copies_after] == [False]
    assert seen.graph.non_static_inputs == []
