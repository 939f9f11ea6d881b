"""What all tests share: `gpu` tests are collected everywhere and skipped where there is no CUDA device; a slow machine
fails no property test, whose examples are limited in number and not in time; compiled kernels are cached for one
session only, so that no test depends on what an earlier one left on the machine. Where there is no GPU, C++ kernels are
compiled without vector instructions: each process finds out for half a minute which ones it can use. On a GPU processes
share what was found out once, and Triton's kernels, in the folder ENCORE_TEST_TOOLCHAIN (`gpu/toolchain.py`)."""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from simulated_gpu.fixtures import compiled_on_cpu, cuda_in_disguise, cuda_on_cpu, weights_let_go, workspaces

from models.precision import precision_places

__all__ = ["compiled_on_cpu", "cuda_in_disguise", "cuda_on_cpu", "weights_let_go", "workspaces"]

gc.disable()  # while tests are collected: see `pytest_collection_finish`

_CACHES = tempfile.TemporaryDirectory(prefix="encore-tests-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{_CACHES.name}/inductor"
_TOOLCHAIN = os.environ.get("ENCORE_TEST_TOOLCHAIN")
os.environ["TRITON_CACHE_DIR"] = f"{_TOOLCHAIN or _CACHES.name}/triton"

if "PYTEST_XDIST_WORKER" in os.environ:  # one of several processes: threads of theirs would wait for each other's cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():  # the driver is not called: a process that called it cannot fork any more
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"

# pytest gives its handlers to loggers that do not propagate, too. Once this one has any, PyTorch writes all graphs of
# each compilation as JSON, which takes a third of the time of compiling.
logging.getLogger("torch.__trace").addHandler = lambda handler: None  # type: ignore[method-assign]

if _TOOLCHAIN:
    from suite.measure.compile_times import share_toolchain

    share_toolchain(Path(_TOOLCHAIN, "vec_isa_ok").exists(), f"{_TOOLCHAIN}/headers")

settings.register_profile("encore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("encore")


@pytest.fixture(autouse=True)
def no_precision_of_another_test() -> Iterator[None]:
    """The suite sets the precision of products for its process. Some tests run its parts in theirs."""
    before = _precisions()
    yield
    if (now := _precisions()) is None or now == before:
        return
    import torch

    torch.set_float32_matmul_precision("highest")
    for place, value in zip(precision_places(), before or (), strict=before is not None):
        place.fp32_precision = value


def _precisions() -> list[str] | None:
    """Return the precisions that are set; None where PyTorch is not imported."""
    return [place.fp32_precision for place in precision_places()] if "torch" in sys.modules else None


@pytest.fixture(autouse=True)
def no_compiled_code_of_another_test() -> None:
    """Tests compile the same library code with many backends. After a number of them Dynamo would compile no more.

    Nor would it compile what comes after a graph break once two threads were in functions compiled with
    `fullgraph=True` at the same time: "skip the frames below" is set for the process and not for the thread, so one of
    them puts back what the other had set (PyTorch 2.11).
    """
    if "torch._dynamo" in sys.modules:
        from torch._C._dynamo import eval_frame

        from optimizations import torch_internals

        if hasattr(eval_frame, "set_eval_frame_override"):  # before PyTorch 2.12
            eval_frame.set_eval_frame_override(eval_frame._EvalFrameOverride.NONE)
        torch_internals.reset_dynamo()
        _compile_without_what_only_logs_say()


def _compile_without_what_only_logs_say() -> None:
    """Much of the time of compiling goes to numbers and lines of logs that nobody reads here. Behind each
    compilation Dynamo empties the processor's caches, to time the guards; they are evaluated here all the same. It
    copies all settings of three compilers and writes them as JSON, for each graph and each backward. And Inductor
    pickles each part of a graph once more, to write what its key in the cache is made of.
    """
    from torch._dynamo import guards, utils

    def evaluated(manager: Any, scope: Any, times: int) -> float:
        for _ in range(times):
            manager.check(scope)
        return 0.0

    guards.profile_guard_manager = evaluated
    for settings_as_json in SETTINGS_IN_LOGS:
        assert hasattr(utils, settings_as_json)
        setattr(utils, settings_as_json, lambda: None)
    inductors_cache = sys.modules.get("torch._inductor.codecache")
    if inductors_cache is not None:
        inductors_cache.FxGraphCachePickler.debug_lines = lambda self, details: []


SETTINGS_IN_LOGS = (
    "_get_dynamo_config_for_logging",
    "_compiler_config_for_logging",
    "_scrubbed_inductor_config_for_logging",
)


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


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For steps over code that is compiled: nothing is so far, and nothing is being captured."""
    import torch
    from simulated_gpu.operators import ASKS

    monkeypatch.setattr(torch.cuda.graphs, ASKS, lambda: False)  # it raises where there is no driver
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# Files with a test, or a fixture of all their tests, of 15 s and more, most of them in processes that they start.
# They begin first: where one is among the last, the other core has nothing to do meanwhile.
LONG_WITHOUT_A_GPU = frozenset(
    (
        "docs/test_extending.py",
        "encore/test_own_packages.py",
        "fuzz/test_fuzz.py",
        "optimizations/capture/callables/test_programs.py",
        "optimizations/test_rank_programs.py",
        "optimizations/torch_internals/test_gpu_state.py",
        "optimizations/trees/test_exits.py",
        "optimizations/trees/test_parameters.py",
        "suite/explain/test_programs.py",
        "suite/explain/test_run.py",
        "suite/explain/test_workloads.py",
        "suite/run/test_torchbench_set.py",
        "suite/worker/test_worker.py",
        "test_end_to_end.py",
        "test_packaging.py",
        "tools/test_real_programs.py",
    )
)


def pytest_collection_finish() -> None:
    """All that was imported and collected stays until the end: no collection in a test has to walk over it."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.relative_to(here).as_posix() not in LONG_WITHOUT_A_GPU)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        items.sort(key=lambda item: item.get_closest_marker("long") is None)
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU (run ./run_tests.sh --gpu on a machine with one)")
    for item in gpu_items:
        item.add_marker(skip)
