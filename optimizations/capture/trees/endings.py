"""Ends of processes: process groups that are destroyed, interpreters that exit, and forks.

Note [Graphs that hold collectives]. A process whose CUDA graphs hold collectives does not return from
`destroy_process_group`: the communicator waits for graphs that refer to it. Freed first, it returns at once. So that
function, and the end of the interpreter, free such graphs first. It is replaced in PyTorch's modules only once a
function with collectives is recorded.

Note [A fork]. A forked child has no CUDA context, and freeing what belongs to one there fails, or ends the process. So
the child keeps everything it inherited, unused, until it ends.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from optimizations.capture.trees import containers

_INHERITED: list[Any] = []
_hooks: list[Callable[[], None]] = []


def in_a_process_group() -> bool:
    """Whether there is a process group that may be destroyed."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def free_before_process_groups_end(free: Callable[[], None]) -> None:
    """Let `free` run before a process group is destroyed and before the interpreter exits.

    To be called for each recording with a collective; only the first call does anything.
    """
    if _hooks:
        return
    _hooks.append(free)
    atexit.register(free)
    distributed = torch.distributed
    stock = distributed.destroy_process_group

    @functools.wraps(stock)
    def destroy_process_group(*arguments: Any, **keywords: Any) -> Any:
        free()
        return stock(*arguments, **keywords)

    modules: tuple[Any, ...] = (distributed, distributed.distributed_c10d)
    for module in modules:
        if getattr(module, "destroy_process_group", None) is stock:
            module.destroy_process_group = destroy_process_group


def _keep_what_was_inherited() -> None:
    """Note [A fork]."""
    _INHERITED.extend(containers.everything())


os.register_at_fork(after_in_child=_keep_what_was_inherited)
