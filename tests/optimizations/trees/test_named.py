"""Inputs named in generated code are read in place without a proof; other uses are compared or copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import COUNT, Compiled, Model, check, values

from optimizations.graph.pointers import Analysis, InputVerdict, Reason, ReasonCode, UnexplainedWord
from optimizations.in_place import examination, session
from optimizations.in_place.generated import GeneratedCode, Launch


def test_function_with_unknown_calls_is_captured_once(cuda_on_cpu: CudaOnCpu) -> None:
    model, w = Model(cuda_on_cpu, code=GeneratedCode("it calls a custom operator, mine::op")), values(7)
    compiled = Compiled(model)
    check(compiled, w)
    assert model.runs == ["plain", "captured"]
    assert "mine::op" in str(compiled.reports[0].off)
    assert compiled.reports[0].copied_bytes == 2 * COUNT * 4


USED_BY_PRODUCTS = {
    "triton_uses": {0: 1, 2: 1},
    "launches": (Launch("body", (0, 2)),),
    "products": frozenset({0, 1, 2}),
}
"""A product reads y as well."""

LAUNCHED = {"triton_uses": {0: 1, 1: 1, 2: 1}, "launches": (Launch("body", (0, 1, 2)),)}


@pytest.mark.parametrize("opaque", [None, "it takes part in a collective, _c10d_functional::all_reduce_"])
def test_named_inputs_are_read_in_place_without_a_capture(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch, opaque: str | None
) -> None:
    """Nothing is captured or tried out, so it holds next to collectives too."""
    model, w = Model(cuda_on_cpu, code=GeneratedCode(opaque, **LAUNCHED)), values(7)
    compiled = Compiled(model)
    check(compiled, w, calls=8)
    assert model.runs == ["plain", "captured"]
    (report,) = compiled.reports
    assert (report.copied_bytes, report.pointer_bytes) == (0, 16)
    assert [one.indirect for one in report.inputs] == [True, True]


@pytest.mark.parametrize("opaque", [None, "it takes part in a collective, _c10d_functional::all_reduce_"])
def test_inputs_with_other_uses_are_compared_or_copied(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch, opaque: str | None
) -> None:
    """y has a use that is not an argument of a Triton kernel: a second capture finds it, where there may be one."""
    code = GeneratedCode(opaque, **USED_BY_PRODUCTS)
    model, w = Model(cuda_on_cpu, code=code), values(7)
    compiled = Compiled(model)
    check(compiled, w, calls=14)
    (report,) = compiled.reports
    if opaque is None:
        assert model.runs == ["plain", "captured", "captured"]
        assert [one.indirect for one in report.inputs] == [True, True]
    else:
        assert model.runs == ["plain", "captured"]
        assert [one.indirect for one in report.inputs] == [True, False]
        assert "all_reduce_" in report.inputs[1].reasons[0]
        assert report.copied_bytes == COUNT * 4


def test_input_of_another_operator_is_copied(cuda_on_cpu: CudaOnCpu) -> None:
    """Its address is found in the graph, but a library may have it in memory as well."""
    compiled, w = Compiled(Model(cuda_on_cpu, code=GeneratedCode(None, products=frozenset({0})))), values(7)
    check(compiled, w, calls=12)
    (report,) = compiled.reports
    assert [one.indirect for one in report.inputs] == [True, False]
    assert report.inputs[1].reasons == (session.OTHER_USES,)


def test_named_inputs_need_no_comparison(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unexplained padding prevents in-place reading of all inputs but those whose uses are named."""

    made: list[int] = []

    def doubtful(*captures: Any, further: Sequence[Any], **options: Any) -> Analysis:
        made.append(len(further))
        reason = (Reason(ReasonCode.UNEXPLAINED, "a word changed"),)
        return Analysis(tuple(InputVerdict(index, (), reason) for index in (0, 1)), (UnexplainedWord(0, 0, 0),))

    monkeypatch.setattr(examination, "find_pointer_uses", doubtful)
    code = GeneratedCode(None, **USED_BY_PRODUCTS)
    model, w = Model(cuda_on_cpu, code=code), values(7)
    compiled = Compiled(model)
    check(compiled, w, calls=10)
    assert made == list(range(7)), "a control, a repeat and a third capture, and each again, one after another"
    assert model.runs == ["plain", "captured", *["captured"] * 7]
    (report,) = compiled.reports
    assert [one.indirect for one in report.inputs] == [True, False]
    assert report.inputs[1].reasons == ("a word changed",)
