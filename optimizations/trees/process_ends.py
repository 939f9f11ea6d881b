"""Handle ends of processes: process groups that are destroyed, interpreters that exit, and forks.

Note [Graphs that hold collectives]. `destroy_process_group` blocks while CUDA graphs with collectives exist, because
the communicator waits for graphs that refer to it. If the graphs are freed first, it returns at once. So that function
and the interpreter's exit free such graphs first. The function is replaced in PyTorch's modules only once a function
with collectives is recorded.

Note [A process that is gone]. Freeing waits for the GPU, and a GPU in a collective waits for the other processes:
forever, if one of them raised, was interrupted or died. So a process that exits waits for its GPU for at most
`PATIENCE_S`. After that the graphs are kept, and a thread that does not need the interpreter ends the process with a
traceback if it has not ended within `LAST_S`. A program that destroys a process group waits as under stock.

Note [A fork]. A forked child has no CUDA context, and freeing CUDA objects there fails or crashes the process. So the
child keeps everything it inherited, unused, until it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import os
import sys
import threading
from typing import Any

import torch

from optimizations.in_place.generated import GeneratedCode
from optimizations.stack_trace import one_line
from optimizations.trees import containers

PATIENCE_S = 3.0
"""How long the GPU may take to finish when a process ends."""
LAST_S = 5.0
"""How long the process may take to end after that."""

_INHERITED: list[Any] = []


def in_a_process_group() -> bool:
    """Return whether there is a process group that may be destroyed."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def several_ranks(code: GeneratedCode) -> bool:
    """Return whether a generated function communicates with other processes."""
    return code.collective and in_a_process_group() and torch.distributed.get_world_size() > 1


@functools.cache
def free_before_process_groups_end() -> None:
    """Free all graphs before a process group is destroyed and before the interpreter exits.

    Call this for each recording with a collective; only the first call has an effect.
    """
    owner = os.getpid()

    def at_exit() -> None:
        if os.getpid() != owner:
            return
        if _is_done_within(PATIENCE_S):
            _free()
            return
        _say(f"the GPU waits for another process, which does not come: this process ends in {LAST_S:g} s")
        faulthandler.dump_traceback_later(LAST_S, exit=True)

    atexit.register(at_exit)
    distributed = torch.distributed
    stock = distributed.destroy_process_group

    @functools.wraps(stock)
    def destroy_process_group(group: Any = None) -> Any:
        if os.getpid() == owner:
            _free()
        return stock(group)

    modules: tuple[Any, ...] = (distributed, distributed.distributed_c10d)
    for module in modules:
        if getattr(module, "destroy_process_group", None) is stock:
            module.destroy_process_group = destroy_process_group


def _free() -> None:
    try:
        containers.free_all()
    except Exception as error:  # the GPU is in an error state: the process continues to end
        _say(f"CUDA graphs could not be freed: {one_line(error)}")


def _is_done_within(seconds: float) -> bool:
    """Return whether the current GPU finishes its work within `seconds`. A GPU in an error state has finished."""
    if not torch.cuda.is_initialized():
        return True
    device = torch.cuda.current_device()

    def wait_for_the_gpu() -> None:
        with contextlib.suppress(Exception):
            torch.cuda.synchronize(device)

    waiting = threading.Thread(target=wait_for_the_gpu, name="encore-ending", daemon=True)  # it may never return
    waiting.start()
    waiting.join(seconds)
    return not waiting.is_alive()


def _say(text: str) -> None:
    print(f"encore: {text}", file=sys.stderr, flush=True)


os.register_at_fork(after_in_child=lambda: _INHERITED.extend(containers.everything()))  # Note [A fork]
