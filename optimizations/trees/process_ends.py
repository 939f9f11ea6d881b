"""Handle ends of processes: process groups that are destroyed, interpreters that exit, and forks.

Note [Graphs that hold collectives]. `destroy_process_group` blocks while CUDA graphs with collectives exist, because
the communicator waits for graphs that refer to it. If the graphs are freed first, it returns at once. So that function
and the interpreter's exit free such graphs first. The function is replaced in PyTorch's modules only once a function
with collectives is recorded.

Note [A process that is gone]. Freeing waits for the GPU, and a GPU in a collective waits for the other processes:
forever, if one of them raised, was interrupted or died. So Encore waits for the GPU for at most `PATIENCE_S`. Then the
groups are aborted, which ends their kernels. The communicators wait for the graphs, which are freed as soon as the GPU
is done. If that does not help either, a thread that does not need the interpreter ends the process with a traceback
after another `LAST_S`. All of it takes less than ten seconds.

Note [A fork]. A forked child has no CUDA context, and freeing CUDA objects there fails or crashes the process. So the
child keeps everything it inherited, unused, until it ends.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.in_place.generated import GeneratedCode
from optimizations.stack_trace import one_line
from optimizations.trees import containers

PATIENCE_S = 3.0
"""How long the GPU may take to finish when a process, or its process group, ends."""
ABORT_S = 3.0
"""How long it may take after the groups were aborted."""
LAST_S = 2.0
"""How long the process may take to end after that."""

_INHERITED: list[Any] = []
_hooked = threading.Event()
"""Set once graphs are freed before the process group and at exit."""
_armed = threading.Event()
"""Set while a timer is running that will end this process."""
_hopeless = threading.Event()
"""Set once the GPU did not finish even after the groups were aborted."""


def in_a_process_group() -> bool:
    """Return whether there is a process group that may be destroyed."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def several_ranks(code: GeneratedCode) -> bool:
    """Return whether a generated function communicates with other processes."""
    return code.collective and in_a_process_group() and torch.distributed.get_world_size() > 1


def free_before_process_groups_end() -> None:
    """Free all graphs before a process group is destroyed and before the interpreter exits.

    Call this for each recording with a collective; only the first call has an effect.
    """
    if _hooked.is_set():
        return
    _hooked.set()
    owner = os.getpid()

    def at_exit() -> None:
        if os.getpid() == owner:
            let_go(None)

    atexit.register(at_exit)
    distributed = torch.distributed
    stock = distributed.destroy_process_group

    @functools.wraps(stock)
    def destroy_process_group(group: Any = None) -> Any:
        if os.getpid() != owner:
            return stock(group)
        try:
            return None if let_go(group) else stock(group)
        finally:
            if _armed.is_set():
                _armed.clear()
                faulthandler.cancel_dump_traceback_later()

    modules: tuple[Any, ...] = (distributed, distributed.distributed_c10d)
    for module in modules:
        if getattr(module, "destroy_process_group", None) is stock:
            module.destroy_process_group = destroy_process_group


def let_go(group: Any) -> bool:
    """Free graphs with collectives of this group (None: of all groups). Note [A process that is gone].

    Returns:
        Whether the group was aborted meanwhile, so that it no longer exists.
    """
    if _hopeless.is_set():
        _arm(LAST_S)
        return False
    if _done_within(PATIENCE_S):
        _free()
        return False
    _say("the GPU waits for another process, which does not come; the process group is aborted")
    _arm(ABORT_S + LAST_S)
    aborting = _in_background(lambda: torch_internals.abort_process_group(group))
    if not _done_within(ABORT_S):
        _hopeless.set()
        _say(f"this process ends in {LAST_S:g} s, and its CUDA graphs are not freed")
        return False
    _free()
    wait([aborting], LAST_S)
    return aborting.done() and aborting.exception() is None


def _arm(seconds: float) -> None:
    _armed.set()
    faulthandler.dump_traceback_later(seconds, exit=True)


def _free() -> None:
    try:
        containers.free_all()
    except Exception as error:  # the GPU is in an error state: the process continues to end
        _say(f"CUDA graphs could not be freed: {one_line(error)}")


def _done_within(seconds: float) -> bool:
    """Return whether the current GPU finishes its work within `seconds`. A GPU in an error state has finished."""
    if not torch.cuda.is_initialized():
        return True
    device = torch.cuda.current_device()
    return bool(wait([_in_background(lambda: torch.cuda.synchronize(device))], seconds).done)


def _in_background(work: Callable[[], Any]) -> Future[Any]:
    """Run something that may never return on a thread that is not joined."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="encore-ending", daemon=True).start()
    return future


def _say(text: str) -> None:
    print(f"encore: {text}", file=sys.stderr, flush=True)


def _keep_what_was_inherited() -> None:
    """Keep what was inherited from the parent process. Note [A fork]."""
    _INHERITED.extend(containers.everything())


os.register_at_fork(after_in_child=_keep_what_was_inherited)
