"""Refuse modules that work with other processes or GPUs: no callable may run one.

DistributedDataParallel makes itself ready in each forward, and only then exchanges the gradients of the backward that
follows. A launch runs none of that, and each process would go on with gradients of its own. What it wraps may be
graphed: it calls that as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from optimizations.capture.step.observer import StepRefused
from optimizations.report.steps import Refusal


def _refused(module: Any, what: str) -> Refusal | None:
    """Return why no graph may run this module. `what`: "is", or that it runs it."""
    kind = type(module).__qualname__
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return Refusal(
            f"{what} a {kind}: processes exchange gradients by what its forward does in Python, and a graph runs none",
            "pass the module that it wraps, or layers of that",
        )
    if isinstance(module, torch.nn.DataParallel):
        return Refusal(f"{what} a {kind}, which copies the module in each call", "use DistributedDataParallel")
    if "FullyShardedDataParallel" in kind or kind.startswith("FSDP"):
        return Refusal(
            f"{what} a fully sharded module, whose weights are elsewhere in each call",
            "use DistributedDataParallel, or pass what lies between its collectives",
        )
    return None


@contextlib.contextmanager
def not_run(function: Callable[..., Any], modules: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """Refuse calls of such modules among these in the block. Others of a program's objects may hold one.

    Raises:
        StepRefused: `function` itself is one, or one is called.
    """
    if (refusal := _refused(function, "is")) is not None:
        raise StepRefused(refusal)
    with contextlib.ExitStack() as hooks:
        for path, module in modules.items():
            if (refusal := _refused(module, f"runs {path},")) is not None:
                hooks.callback(module.register_forward_pre_hook(_refusing(refusal), prepend=True).remove)
        yield


def _refusing(refusal: Refusal) -> Callable[..., None]:
    def refuse(module: torch.nn.Module, args: Any) -> None:
        raise StepRefused(refusal)

    return refuse
