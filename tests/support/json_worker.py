"""Talk to a worker process in lines of JSON, with a limit of time for each answer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Say = Callable[[Mapping[str, Any]], None]


class NoAnswer(Exception):
    """A worker ended, said something else than JSON, or (`late`) took too long and was ended."""

    def __init__(self, reason: str, *, late: bool = False) -> None:
        super().__init__(reason)
        self.late = late


class JsonWorker:
    """A process that reads and writes lines of JSON. It ends with all that it started; its errors go to a log."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._is_killed = False
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
            )

    def send(self, message: Mapping[str, Any]) -> None:
        """Write a line. Raises OSError if the process has ended."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any]:
        """Return the next message. Raises NoAnswer."""
        assert self._process.stdout
        late = threading.Event()

        def end() -> None:
            late.set()
            self._signal()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line.endswith("\n"):  # it ended, maybe within a line
            if late.is_set():
                raise NoAnswer("no answer in time", late=True)
            code = self._process.wait()
            raise NoAnswer(f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:
            raise NoAnswer(f"its answer is no JSON: {line[:100]!r}") from None
        return message

    def kill(self) -> None:
        """End the process, whatever state it is in."""
        self._signal()
        self._process.wait()
        self._is_killed = True  # its number may be another process's from now on

    def _signal(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if not self._is_killed:
                os.killpg(self._process.pid, signal.SIGKILL)


def channel() -> Say:
    """Return a function by which a worker sends messages. Whatever else it prints goes to the log."""
    messages = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: Mapping[str, Any]) -> None:
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    return say
