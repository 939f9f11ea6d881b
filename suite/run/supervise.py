"""Start and end processes of the suite: each in its own session, with a log for its output.

Temporary files of a process go to its own folder, which is deleted with it.

Note [Strays]: children of a process (compile workers, ptxas, the C++ compiler) are in its process group and end with
it. A child that starts its own session leaves the group, and once its parent has ended only its environment links it to
the process. So each process gets a mark in its environment, which children inherit, and ending a process includes
killing all processes with its mark.

The module also provides a cache of compiled Python for processes that import torch, where the installation has none.

Images are often built without compiled Python (`pip install --no-compile`, PYTHONDONTWRITEBYTECODE), and folders of
packages may be read-only. Each process then compiles 2,700 files of PyTorch: 8 s of a core, in 40 processes of a
workload and in their compile workers. So they share a folder for compiled files.

Ctrl-C, SIGTERM and a closed terminal raise the same exception, so that each `finally` runs once.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import secrets
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from suite.worker.compile_cache import user_cache

MARK = "ENCORE_WORKER"
"""The environment variable that every process started here has, and whatever it starts inherits."""
RUN_MARK = secrets.token_hex(8)
"""Beginning of the marks of this program's processes."""
_numbers = itertools.count()

KILL_ROUNDS = 5
KILL_WAIT_S = 3.0
TERM_GRACE_S = 3.0
"""Time between SIGTERM and SIGKILL."""
TRACEBACK_GRACE_S = 1.0
"""Time for a process that took too long to log its stack."""
EXIT_GRACE_S = 5.0
"""Time between the end of a process's pipe and the end of the process, which differ in a normal exit, too."""
LOG_TAIL_BYTES = 4000


class Supervised:
    """Run one process. Its stdout and stderr are appended to the log.

    End it with `end`: garbage collection does not.
    """

    def __init__(
        self, command: Sequence[str], log: Path, *, pass_fds: Sequence[int] = (), env: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        self.mark = f"{RUN_MARK}.{next(_numbers)}"
        self._log_start = log.stat().st_size if log.exists() else 0
        self.temporary = TemporaryFolder()
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=pass_fds,
                    start_new_session=True,
                    env={
                        **os.environ,
                        **bytecode_environment(),
                        "TMPDIR": self.temporary.name,
                        **(env or {}),
                        MARK: self.mark,
                    },
                )
        except BaseException:
            self.temporary.cleanup()
            raise
        self.exit_fd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exited(self) -> bool:
        return self._exit_info() is not None

    def cpu_seconds(self) -> float:
        """Return the processor time of the process and its children, 0 once it has ended."""
        with suppress(psutil.NoSuchProcess):
            return tree_cpu_s(psutil.Process(self.pid))
        return 0.0

    def was_killed(self) -> bool:
        info = self._exit_info()
        return info is not None and info.si_code != os.CLD_EXITED

    def exit_description(self) -> str:
        """Return how the process ended, in words. The process stays a zombie, so that its group keeps its number."""
        info = self._exit_info()
        if info is None:
            return "is still running"
        if info.si_code == os.CLD_EXITED:
            return f"ended with exit code {info.si_status}"
        name = signal.Signals(info.si_status).name if info.si_status < signal.SIGRTMIN else f"signal {info.si_status}"
        hint = ", often the kernel's answer to a lack of memory" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"

    def log_tail(self) -> str:
        """Return the last few KB this process wrote to its log."""
        with self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()

    def signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def write_tracebacks(self) -> None:
        """Make a process that took too long log the traceback of each thread, if `faulthandler` handles SIGUSR1.

        The signal ends processes without this handler, including children of the process.
        """
        self.signal_group(signal.SIGUSR1)
        await_exit([self], TRACEBACK_GRACE_S)

    def reap(self) -> None:
        """Collect the exit status, but do not wait for a process that hangs in a driver call."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_GRACE_S)
        os.close(self.exit_fd)

    def _exit_info(self) -> os.waitid_result | None:
        return os.waitid(os.P_PIDFD, self.exit_fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def end(processes: Iterable[Supervised]) -> None:
    """End processes and everything they started; return when none of it is left."""
    processes = list(processes)
    for process in processes:
        process.signal_group(signal.SIGTERM)
    await_exit(processes, TERM_GRACE_S)
    for process in processes:
        process.signal_group(signal.SIGKILL)
    for process in processes:
        process.reap()
    if processes:
        kill_strays({process.mark for process in processes})
    for process in processes:
        process.temporary.cleanup()


def await_exit(processes: Iterable[Supervised], grace_s: float) -> None:
    """Wait until these processes have ended, at most so long."""
    deadline = time.monotonic() + grace_s
    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(process.exit_fd, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(key.fileobj)


def tree_cpu_s(process: psutil.Process) -> float:
    """Return processor time of a process and its children, including children that have ended."""
    seconds = 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            seconds += sum(each.cpu_times()[:4])  # the last two are those of children that have ended
    return seconds


def kill_children() -> None:
    """Kill all children of this program after an interruption.

    Otherwise PyTorch waits for its compile workers when Python ends, up to five minutes.
    """
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()


def kill_strays(marks: Collection[str] | None = None) -> None:
    """Kill processes with one of these marks; None: with the mark of any process of this program. See Note [Strays].

    The search is repeated until no process is found, because one may have started another meanwhile. The number of
    searches is limited, because a process that hangs in a driver call does not end.
    """
    for _ in range(KILL_ROUNDS):
        found = [process for process in psutil.process_iter() if _is_stray(process, marks)]
        if not found:
            return
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, KILL_WAIT_S)


def _is_stray(process: psutil.Process, marks: Collection[str] | None) -> bool:
    """Return whether a process has one of these marks. A zombie has no environment, and so no mark."""
    if process.pid == os.getpid():
        return False
    try:
        mark = process.environ().get(MARK, "")
    except (psutil.Error, OSError):
        return False
    return mark.startswith(RUN_MARK) if marks is None else mark in marks


class TemporaryFolder(tempfile.TemporaryDirectory[str]):
    """Make a folder that is deleted at the end of a block."""

    def __init__(self) -> None:
        super().__init__(prefix="encore-temporary-", ignore_cleanup_errors=True)


BYTECODE = "bytecode"
"""The folder's name in the user's cache."""


def bytecode_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return additions to a process's environment; none if torch is compiled or the user has chosen a folder."""
    torch = importlib.util.find_spec("torch")  # without importing it
    compiled = torch is not None and torch.cached is not None and Path(torch.cached).exists()
    if compiled or environment.get("PYTHONPYCACHEPREFIX"):
        return {}
    return {"PYTHONPYCACHEPREFIX": str(user_cache() / BYTECODE), "PYTHONDONTWRITEBYTECODE": ""}


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """Report a signal to end the program. It is no `Exception`, so that no handler of those catches it."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` for the first of `SIGNALS`, and ignore later ones until the program has ended.

    A signal that was ignored from the start (nohup) stays ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        while before:
            signal.signal(before.popitem()[0], signal.SIG_IGN)
        raise Interrupted(signal.Signals(number).name)

    before = {each: old for each in SIGNALS if (old := signal.getsignal(each)) is not signal.SIG_IGN}
    try:
        for each in before:
            signal.signal(each, interrupt)
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
