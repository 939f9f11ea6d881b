"""Processes that a test starts with `python SCRIPT` or `python -m MODULE`, forked off one that has imported PyTorch.

An interpreter that imports PyTorch and its compilers takes four seconds of CPU, and one more to end; a fork takes none
of them. In a test with the fixture `forked_python`, `subprocess.Popen` asks a server for such a fork, and it is this
process's child all the same: a process whose parent has ended belongs to the nearest ancestor that takes in orphans,
which is this one while it asks. So waiting, signals, groups and descriptors are what they always are.

What the server has imported is hidden until the program imports it itself: "torch" is not among the modules before, and
Encore's own modules are imported by each program. Nothing of the test's process is there, for the server is an
interpreter of its own. Arguments, variables, folder, standard streams and search path are those of the command. PyTorch
reads some variables when it is imported: for other values of them there is another server, and a program that sets them
itself is told. What differs: /proc shows the server's command and variables, `sys.flags` are the server's, and modules
are not taken apart at the end. A test about these, or about the start itself, starts interpreters.

A program of `STARTERS` gets a server of its own, forked beside it, for the workers that it starts.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

LAYERS = (
    ("torch", "numpy", "pydantic", "psutil"),
    (
        "torch._dynamo.aot_compile", "torch._inductor.compile_fx", "torch._inductor.scheduler",
        "torch._inductor.lowering", "torch._inductor.fx_passes.joint_graph", "torch._inductor.fx_passes.pad_mm",
        "torch._inductor.fx_passes.post_grad", "torch._inductor.codegen.cpp", "torch._inductor.codegen.wrapper",
        "torch._inductor.codegen.cuda_combined_scheduling",
    ),
)  # fmt: skip
"""What the server imports. A package appears with all its modules up to the layer of the one that is asked for."""

AS_IMPORTED = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL": "0",
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Variables of the server where a command has none of its own: what `suite.worker` sets before it imports PyTorch."""

READ_AT_IMPORT = ("TORCH", "PYTORCH", "TRITON", "OMP", "MKL", "KMP", "THP")
"""How names of variables begin that PyTorch and its compilers may read when they are imported."""
READ_LATER = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"})
ADJUSTED = frozenset({"OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"})
"""What was made of them is put right where the program imports PyTorch."""

STARTERS = ("suite", "programs.py")
"""Programs that start workers."""

MESSAGE_BYTES = 1 << 18
DESCRIPTORS = 16
TAKE_IN_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER


def not_adjusted(variables: Mapping[str, str]) -> dict[str, str]:
    """Those that must be the same in the server and in the program."""
    read = {name: value for name, value in variables.items() if name.startswith(READ_AT_IMPORT)}
    return {name: value for name, value in {**AS_IMPORTED, **read}.items() if name not in READ_LATER | ADJUSTED}


class Server:
    """The side that asks. It starts with the first question; its process ends with this one, or with `stop`."""

    def __init__(self, requests: socket.socket | None = None) -> None:
        self._requests = requests
        self._process: subprocess.Popen[bytes] | None = None
        self._read: dict[str, str] = {}
        self._lock = threading.Lock()

    def fork(self, told: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """The process, which is a child of this one."""
        take_in = ctypes.CDLL(None).prctl
        with self._lock:
            requests = self._started(told["variables"])
            take_in(TAKE_IN_ORPHANS, 1, 0, 0, 0)
            try:
                socket.send_fds(requests, [json.dumps(told).encode()], list(descriptors))
                return int(requests.recv(MESSAGE_BYTES))
            except BaseException:  # also the time limit of a test: no later question gets the answer to this one
                self._stop()
                raise
            finally:
                take_in(TAKE_IN_ORPHANS, 0, 0, 0, 0)

    def _started(self, variables: Mapping[str, str]) -> socket.socket:
        if self._process is not None and self._read != not_adjusted(variables):
            self._stop()
        if self._requests is None:
            self._read = not_adjusted(variables)
            self._requests, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            kept = {
                name: value
                for name, value in os.environ.items()
                if not name.startswith((*READ_AT_IMPORT, "PYTHONPATH"))
            }
            with there:
                self._process = RealPopen(
                    [sys.executable, "-P", __file__, str(there.fileno())],
                    pass_fds=[there.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**kept, **AS_IMPORTED, **self._read},
                )
        return self._requests

    def _stop(self) -> None:
        if self._requests is not None:
            self._requests.close()
        if self._process is not None:
            self._process.wait()
        self._requests = self._process = None


server = Server()
RealPopen = subprocess.Popen
_EXECUTE = inspect.signature(RealPopen._execute_child)  # type: ignore[attr-defined]


class ForkedPopen(RealPopen):
    """`subprocess.Popen` where programs of Python's are forked off the server, all others started as they are."""

    def _execute_child(self, *arguments: Any) -> None:
        given = _EXECUTE.bind(self, *arguments).arguments
        if not _is_forked(given):
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        standard = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        standard = [number if file == -1 else file for number, file in enumerate(standard)]
        passed = sorted(given["pass_fds"])
        told = {
            "command": list(map(str, given["args"])),
            "variables": dict(os.environ if given["env"] is None else given["env"]),
            "folder": str(given["cwd"] or Path.cwd()),
            "session": given["start_new_session"],
            "numbers": [0, 1, 2, *passed],
        }
        self.pid = server.fork(told, [*standard, *passed])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]


def _is_forked(given: Mapping[str, Any]) -> bool:
    command = given["args"]
    if isinstance(command, str | bytes) or command[0] != sys.executable or given["preexec_fn"] or given["shell"]:
        return False
    program = command[1:] if command[1] != "-P" else command[2:]
    return program[0] == "-m" or str(program[0]).endswith(".py")


class Hidden(MetaPathFinder, Loader):
    """Modules that are imported already, until somebody imports them."""

    def __init__(self) -> None:
        self._layers: dict[str, int] = {}
        self._modules: dict[str, ModuleType] = {}

    def hide(self, layer: int, own: set[str]) -> None:
        """All modules of installed packages that are there now and not in `own`."""
        for name in [name for name in sys.modules if name not in own]:
            if name.partition(".")[0] not in sys.stdlib_module_names:
                self._layers.setdefault(name, layer)
                self._modules[name] = sys.modules[name]

    def begin(self) -> None:
        for name in self._modules:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self._modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        package = spec.name.partition(".")[0]
        if package == "torch":
            _check_variables()
        found = self._modules[spec.name]
        layer = self._layers[spec.name]
        for name in [name for name in self._modules if name.partition(".")[0] == package]:
            if self._layers[name] <= layer:
                sys.modules[name] = self._modules.pop(name)
        spec.loader_state = found.__spec__  # the import machinery gives the module this spec
        return found

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
        _adjust(module)
        if module.__name__.startswith("torch.") and self._layers[module.__name__]:
            _adjust_compilers()


hidden = Hidden()
_served: dict[str, str] = {}


def _check_variables() -> None:
    there = not_adjusted(os.environ)
    differ = sorted(name for name, _ in there.items() ^ _served.items())
    if differ:
        raise RuntimeError(f"PyTorch was imported with other values of {differ}: start an interpreter of its own")


def _adjust(module: Any) -> None:
    """What an import would have made of the variables that may differ; and chance is another one in each process."""
    if module.__name__ == "numpy":
        module.random.seed()
    if module.__name__ == "torch":
        module.default_generator.seed()
        if "OMP_NUM_THREADS" in os.environ:
            module.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _adjust_compilers() -> None:
    config: Any = sys.modules["torch._inductor.config"]
    config.compile_threads = config.decide_compile_threads()


def serve(requests: socket.socket) -> dict[str, Any]:
    """Returns in forked processes alone, with what each is to be."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, DESCRIPTORS)
        if not message:
            os._exit(0)
        assert len(list(Path("/proc/self/task").iterdir())) == 1, threading.enumerate()
        read, write = os.pipe()
        begins, orphaned = os.pipe()
        parent = os.fork()
        if parent == 0:
            if os.fork():
                os._exit(0)
            told: dict[str, Any] = json.loads(message)
            if told["session"]:
                os.setsid()
            os.write(write, str(os.getpid()).encode())
            for file in (read, write, orphaned):
                os.close(file)
            os.read(begins, 1)
            os.close(begins)
            if any(Path(argument).name in STARTERS for argument in told["command"]):
                spare, requests = _with_spare(requests, files)
                if spare:
                    continue
            else:
                requests.close()
            _take(files, told["numbers"])
            return told
        os.close(write)
        os.waitpid(parent, 0)  # from now on its child is the one's who asks, and may begin
        requests.send(os.read(read, 32))
        for file in (read, begins, orphaned, *files):
            os.close(file)


def _with_spare(requests: socket.socket, files: Sequence[int]) -> tuple[bool, socket.socket]:
    """Forks a server for this process: whether this is the server, and the socket of either."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    requests.close()
    if os.fork() == 0:
        here.close()
        for file in files:
            os.close(file)
        return True, there
    there.close()
    server._requests = here
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    return False, here


def _take(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives descriptors the numbers that they have in the process which passed them."""
    above = max(numbers) + 1
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for file in files:
        os.close(file)
    if server._requests is not None:  # its number may be one of these
        moved = fcntl.fcntl(server._requests.fileno(), fcntl.F_DUPFD_CLOEXEC, above)
        server._requests.close()
        server._requests = socket.socket(fileno=moved)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def become(told: Mapping[str, Any]) -> NoReturn:
    """Runs the command as the main program of this process, which ends with it."""
    os.environ.clear()
    os.environ.update(told["variables"])
    os.chdir(told["folder"])
    program = told["command"][1:]
    safe_path = program[0] == "-P"
    program = program[safe_path:]
    sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    is_module = program[0] == "-m"
    if not safe_path:
        sys.path.insert(0, told["folder"] if is_module else str(Path(program[0]).resolve().parent))
    ended: int | str | None = 0
    try:
        sys.argv = program[1:] if is_module else list(program)
        if is_module:
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        ended = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        ended = 1
    leave(ended)


def leave(ended: int | str | None) -> NoReturn:
    """As Python does, but that modules are not taken apart."""
    if isinstance(ended, str):
        print(ended, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended if isinstance(ended, int) else int(ended is not None))


def main(number: int) -> None:
    requests = socket.socket(fileno=number)
    requests.set_inheritable(False)
    _served.update(not_adjusted(os.environ))
    own = set(sys.modules)
    for layer, names in enumerate(LAYERS):
        for name in names:
            importlib.import_module(name)
        hidden.hide(layer, own)
    hidden.begin()
    gc.freeze()  # no collection in a fork touches, and so copies, what is here
    become(serve(requests))


if __name__ == "__main__":
    main(int(sys.argv[1]))
