"""Under pytest-xdist a worker whose CUDA context is broken leaves, so that the tests after it get a fresh one.

After an illegal access every CUDA call of a process fails, and so would every later test of its worker, with errors
that say nothing about them. The test that did it is reported as the crash of its worker, whatever its own outcome was:
work on the GPU may fail after the test has ended.
"""

from __future__ import annotations

import os
import sys

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
