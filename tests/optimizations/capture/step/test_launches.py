"""The launch log attributes nodes of a captured step to named kernels, operators with arguments, or unknown code."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optimizations import torch_internals
from optimizations.capture.step.launches import Launches, numbers_of
from optimizations.capture.step.observer import Observer
from optimizations.concurrency.launch_log import LaunchLog, Logged
from optimizations.concurrency.order import Launch
from optimizations.graph.records import MemoryRange


def test_operators_are_logged_where_they_add_nodes() -> None:
    nodes = 0

    def adding(count: int) -> None:
        nonlocal nodes
        nodes += count

    log = LaunchLog(lambda: nodes, device_type="cpu", notes_memory=False)
    x = torch.ones(2)
    with log.noting(operators=False):
        log.operator(torch.ops.aten.mul.Tensor, (x, x), {}, lambda: adding(2), [77])
        log.operator(torch.ops.aten.view.default, (x, [2]), {}, lambda: adding(0), [78])
        launches = Launches.of(log)
        assert (launches.read, launches.unknown) == ({77}, None)
        assert not any(one.launch.reads or one.launch.writes for one in log.logged)
        log.operator(torch.ops.aten.sin.default, (x.to_sparse(),), {}, lambda: adding(1))
        assert "sparse" in str(Launches.of(log).unknown)
        adding(1)
    assert "neither an operator" in str(log.logged[-1].launch.barrier)


@pytest.mark.parametrize(("added", "reason"), [(1, None), (2, "added 2 nodes")])
def test_kernel_of_one_node_is_known(added: int, reason: str | None) -> None:
    nodes = 0

    def run(*arguments: Any, stream: int) -> None:
        nonlocal nodes
        nodes += added

    kernel: Any = object.__new__(torch_internals.CachingAutotuner)  # type: ignore[call-overload]
    kernel.fn, kernel.run = SimpleNamespace(__name__="triton_double"), run
    kernel.triton_meta, kernel.mutated_arg_names, kernel.custom_kernel = {"signature": {}}, [], False
    module, x = {"kernel": kernel}, torch.ones(4)
    log = LaunchLog(lambda: nodes, device_type="cpu", notes_memory=False)
    with log.noting(module, operators=False):
        module["kernel"].run(x[1:], stream=0)
        launches = Launches.of(log)
    (launch,) = launches.kernels
    assert launch.passed == ((x[1:].data_ptr(), x.data_ptr()),)
    assert launches.unknown is None if reason is None else reason in str(launches.unknown)


def test_nodes_of_unknown_code_are_not_evidence() -> None:
    nodes = 0
    log = LaunchLog(lambda: nodes, device_type="cpu", notes_memory=False)
    with log.noting(operators=False):
        nodes = 1
        assert "came from neither" in str(Launches.of(log).unknown)


def test_possible_addresses_are_distinguished_from_numbers() -> None:
    def holds(tensor: torch.Tensor) -> bool:
        return tensor is there

    there, here = torch.tensor(2**40), torch.tensor(2**41)
    given: list[Any] = [there, here, torch.tensor(2.0**42), torch.tensor([2**43, 1]), [2**44, (2**45, "a")], 2.0**46]
    assert list(numbers_of([*given, True, 7, -(2**40), math.inf, math.nan, 1j, None], holds)) == [
        2**power for power in (41, 42, 43, 44, 45, 46)
    ]
    several = torch.tensor([math.nan, -(2.0**47), 2.0**47, math.inf, 2.0**48], requires_grad=True)
    assert list(numbers_of([several, -several], holds)) == [2**47, 2**48, 2**47]


def given_back() -> torch.Tensor:
    made = torch.ones(1)
    made.untyped_storage().resize_(0)
    return made


@pytest.mark.parametrize(
    "make",
    [
        given_back,
        lambda: torch.ones(1).to_mkldnn(),
        lambda: torch.ones(1, 1).to_sparse_csr(),
        lambda: torch.empty(1, dtype=torch.bits8),
        lambda: torch.empty(1, dtype=torch.uint4),
    ],
)
def test_tensor_without_readable_numbers_yields_none(make: Callable[[], torch.Tensor]) -> None:
    assert list(numbers_of([make()], lambda tensor: False)) == []


def test_number_passed_on_by_an_operator_counts_as_argument() -> None:
    table = torch.zeros(2, dtype=torch.int64)
    log = LaunchLog(lambda: int(table.count_nonzero()), notes_memory=False)  # an operator that writes it added nodes
    observer = Observer(lambda tensor: True, {}, forbid=False)
    observer.log = log
    with log.noting(operators=False), observer:
        table.view(-1)
        table.fill_(2**45)
    launches = Launches.of(log)
    assert launches.read == {table.data_ptr(), 2**45} and launches.unknown is None


def at(address: int) -> MemoryRange:
    return MemoryRange(address=address, size_bytes=16)


def test_unknown_node_prevents_conclusions() -> None:
    launches = Launches()
    launches.kernels.append(Logged(Launch("a", 0), is_operator=False, passed=((64, 64),)))
    assert list(launches.only_named({0: at(64), 1: at(128)})) == [0]
    launches.read |= {63, 80}
    assert launches.only_named({0: at(64)})
    launches.read.add(79)
    assert not launches.only_named({0: at(64)})
    launches.read.clear()
    launches.unknown = "a node"
    assert not launches.only_named({0: at(64)})
