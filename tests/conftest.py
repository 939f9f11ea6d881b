"""What all tests share: `gpu` tests are collected everywhere and skipped where there is no CUDA device; a slow machine
fails no property test, whose examples are limited in number and not in time; compiled kernels are cached for one
session only, so that no test depends on what an earlier one left on the machine."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

_CACHES = tempfile.TemporaryDirectory(prefix="encore-tests-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{_CACHES.name}/inductor"
os.environ["TRITON_CACHE_DIR"] = f"{_CACHES.name}/triton"

settings.register_profile("encore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("encore")


@pytest.fixture(autouse=True)
def no_compiled_code_of_another_test() -> None:
    """Tests compile the same library code with many backends. After a number of them Dynamo would compile no more."""
    if "torch._dynamo" in sys.modules:
        from optimizations import torch_internals

        torch_internals.reset_dynamo()


@pytest.fixture
def fresh_encore() -> Iterator[None]:
    """Nothing is compiled, and nothing reported, before the test and after it."""
    import optimizations
    from optimizations import torch_internals

    torch_internals.reset_dynamo()
    optimizations.reset()
    yield
    optimizations.reset()
    torch_internals.reset_dynamo()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU (run ./run_tests.sh --gpu on a machine with one)")
    for item in gpu_items:
        item.add_marker(skip)
