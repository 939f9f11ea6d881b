"""No test leaves a compiled function or a graph to the next. And under pytest-xdist a worker whose CUDA context is
broken leaves, so that the tests after it get a fresh one.

After an illegal access every CUDA call of a process fails, and so would every later test of its worker, with errors
that say nothing about them. The test that did it is reported as the crash of its worker, whatever its own outcome was:
work on the GPU may fail after the test has ended.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

BROKEN_CONTEXT = 17
"""Exit code of a worker that left."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    import torch

    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"BROKEN CONTEXT after {nodeid}: {error}", file=sys.stderr, flush=True)
        os._exit(BROKEN_CONTEXT)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read inputs in place from the first replays on, not after as many as `budget` requires."""
    from optimizations.in_place import budget

    monkeypatch.setattr(budget, "MOST_WORK", 1e9)
    monkeypatch.setattr(budget, "FEWEST_REPLAYS", 1)


@pytest.fixture(autouse=True)
def unselected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs serve all calls that they can, and stay chains, unless a test says otherwise.

    Most tested programs are tiny, and a race takes more calls than most tests make.
    """
    from forced_branches import concurrency, force_if_asked

    from optimizations.options import Options

    force_if_asked(monkeypatch.setattr)
    parse = Options.parse.__func__  # type: ignore[attr-defined]
    default = {
        "selection": os.environ.get("ENCORE_TEST_SELECTION", "off"),
        "concurrency": concurrency(),
    }
    chosen = classmethod(lambda cls, given: parse(cls, {**default, **(given or {})}))
    monkeypatch.setattr(Options, "parse", chosen)


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Inductor uses the same reductions in every compilation instead of timing several: on a GPU that other tests use,
    two compilations of one program chose different ones, with different last bits. Tests of timing are excepted.

    Its deterministic mode would do more, but Dynamo switches that off whenever it has compiled a frame.
    """
    from optimizations import torch_internals

    drawn = request.node.get_closest_marker("draws") is not None
    with torch_internals.inductor_config.patch({"test_configs.force_filter_reduction_configs": not drawn}):
        yield


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Every test begins and ends without a compiled function, a report or a graph, with PyTorch's numerics, and on the
    default stream: a capture of PyTorch's that fails leaves its stream current."""
    import torch
    from gpu_harness import default_numerics, forget

    forget()
    yield
    torch.cuda.set_stream(torch.cuda.default_stream())
    default_numerics()
    forget()
