"""A process that has imported PyTorch and Encore, and forks the programs of `ranks_on_cpu` from itself.

An interpreter that imports them takes five seconds of CPU; a fork takes none of them. A forked program is what the
interpreter goes on with: it returns from `serve` to the top of `__main__`, runs there, and ends as any other does, with
handlers of `atexit` and the teardown of modules. It has a session, variables, arguments and a log of its own.

Requests and replies are lines of JSON, one after the other. The server has no thread, starts none, and ends with its
input. Its standard input and output are those of a rank from when it is forked, so that no rank holds the server's.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from pathlib import Path
from types import CodeType
from typing import Any

COMMAND = "from rank_server import serve; exec(serve())"
"""The arguments of the server's interpreter: its `__main__` becomes that of each program."""

IMPORTED = (
    "pytest", "torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch._inductor.compile_fx", "simulated_gpu.runtime", "rank_ends",
    "simulated_gpu.trees",
)  # fmt: skip

READY = "ready"
"""The first reply, to no request."""


def serve() -> CodeType:
    """Answer requests until there are no more. It returns in forked processes alone: the program to go on with."""
    for name in IMPORTED:
        importlib.import_module(name)
    print(json.dumps(READY), flush=True)
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            reply = os.waitstatus_to_exitcode(status) if pid else None
        else:
            reply = _forked(request)
            if not reply:
                return _program(request)
        print(json.dumps(reply), flush=True)
    raise SystemExit


def _forked(request: dict[str, Any]) -> int:
    """The process, once it has its session and its log; 0 in that process."""
    assert len(list(Path("/proc/self/task").iterdir())) == 1, [thread.name for thread in threading.enumerate()]
    ready, ready_end = os.pipe()
    pid = os.fork()
    if not pid:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for own, standard in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(own, standard)
        for own in (nothing, log, ready, ready_end):  # closing `ready_end` is what the server waits for
            os.close(own)
        return 0
    os.close(ready_end)
    os.read(ready, 1)
    os.close(ready)
    return pid


def _program(request: dict[str, Any]) -> CodeType:
    """The program of this process, which from here on is a rank."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.argv = [request["path"], *request["arguments"]]
    sys.modules["torch"].default_generator.seed()  # each interpreter draws other numbers; `random` does so itself
    sys.modules["numpy"].random.seed()
    main = sys.modules["__main__"].__dict__
    main.pop("serve")
    main["__file__"], main["__cached__"] = request["path"], None
    return compile(Path(request["path"]).read_text(), request["path"], "exec", dont_inherit=True)
