"""Marks shared by all tests: `gpu` tests are collected everywhere and skipped where there is no CUDA device."""

from __future__ import annotations

import pytest


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
