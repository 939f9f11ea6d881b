"""The check that a prelude works on a device, on a simulated driver."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from cuda.bindings import driver as real
from simulated_gpu.driver import SimulatedDriver, SimulatedTools

from optimizations.graph.driver import CudaCallFailed
from optimizations.graph.prelude_check import failed_prelude


def tells_failure(table: bytes, nodes: bytes, updates: bytes, count: bytes, status: bytes) -> None:
    ctypes.memmove(int.from_bytes(status, "little"), (98).to_bytes(4, "little"), 4)


def does_nothing(*parameters: bytes) -> None:
    pass


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (None, None),
        (tells_failure, "the prelude could not update a node (cudaError_t 98)"),
        (does_nothing, "a graph with a prelude did not read the new address"),
    ],
)
def test_prelude_that_does_not_update_is_found(body: Any, expected: str | None) -> None:
    driver = SimulatedDriver()
    if body is not None:
        driver.functions[driver.prelude_function].body = body
    assert failed_prelude(driver, SimulatedTools(driver), real.CUstream(0)) == expected
    assert not driver.graphs and not driver.executables


def test_graph_of_the_check_is_destroyed_after_a_failure() -> None:
    driver = SimulatedDriver()
    driver.failing = {"cuGraphUpload"}
    with pytest.raises(CudaCallFailed, match="cuGraphUpload"):
        failed_prelude(driver, SimulatedTools(driver), real.CUstream(0))
    assert not driver.graphs and not driver.executables
