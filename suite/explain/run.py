"""Explain targets, each in its own process, so that their side effects and failures do not affect the caller.

This module does not import torch. For a worker that crashes, hangs or is killed the explanation has `error` set, and
the others continue.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import monotonic

from pydantic import ValidationError

from encore.own_packages import script
from models import registry
from suite.explain.records import Explanation, WorkerAnswer
from suite.explain.targets import Target, unexplained
from suite.measure.checkout import git_state
from suite.results.errors import WrongUse
from suite.results.store import REPOSITORY, CannotWrite, describe, make_folder, write_atomically
from suite.run.supervise import Supervised, TemporaryFolder, end

WORKER_COMMAND = script("suite.explain.worker")
TIMEOUT_S = 900.0
"""Limit of one target's processor time, which depends little on the speed and load of the machine."""
IDLE_S = 120.0
"""Time without any use of the processor after which a target counts as hanging, or `timeout_s` where that is less."""
SAY_S = 10.0
"""Time between two progress lines of a target."""
BEAT_S = 0.5
"""Time between two checks of the targets' processor time."""


@dataclass(frozen=True, slots=True)
class Explained:
    """Hold one finished target. `path` is its file, if there is one."""

    target: Target
    explanation: Explanation
    path: Path | None
    done: int
    total: int


def explain_many(
    targets: Sequence[Target],
    *,
    out: Path | None = None,
    jobs: int | None = None,
    timeout_s: float = TIMEOUT_S,
    say: Callable[[str], None] = lambda line: None,
) -> Generator[Explained, None, None]:
    """Explain targets, `jobs` at a time (as many as there are cores by default), yielding each when it is done.

    With `out`, each is written to `<name>.json` there at once (`<name>-<variant>.json` for a variant that is not the
    workload's default). Closing the iterator ends running workers. `say` is called with a line every ten seconds.

    Raises:
        WrongUse: a program is not of a form that `targets` describes, or `out` is not a folder and cannot be made one.
        CannotWrite: the disk is full.
    """
    if out is not None:
        make_folder(out, "--out")
    waiting, done = list(targets), 0
    running: list[_Running] = []
    with TemporaryFolder() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < (jobs or _cores()):
                    running.append(_Running(waiting.pop(0), Path(folder, str(len(targets) - len(waiting))), timeout_s))
                select.select([one.worker.exit_fd for one in running], (), (), BEAT_S)
                for one in running:
                    one.say_how_long(say)
                for one in [one for one in running if one.worker.exited() or one.has_taken_too_long()]:
                    running.remove(one)
                    explanation = one.finish()
                    done += 1
                    path = None if out is None else out / file_name(one.target)
                    if path is not None:
                        _write(path, explanation)
                    yield Explained(one.target, explanation, path, done, len(targets))
        finally:
            end([one.worker for one in running])


def _write(path: Path, explanation: Explanation) -> None:
    try:
        write_atomically(path, explanation.model_dump_json(indent=1) + "\n")
    except CannotWrite as error:
        raise CannotWrite(
            f"cannot write {describe(path)}: {error.__cause__}. What was explained before is intact; make room, then "
            "go on with the same command and --reuse."
        ) from error


def file_name(target: Target) -> str:
    """Return the file of a target's explanation."""
    stem = target.name.replace(":", ".")
    is_default = target.variant is None or target.variant == registry.planned(target.name).variants[0]
    return f"{stem}.json" if is_default else f"{stem}-{target.variant}.json"


class _Running:
    """Hold a target with its worker, from the start."""

    def __init__(self, target: Target, folder: Path, timeout_s: float) -> None:
        folder.mkdir()
        self.target = target
        self.timeout_s = timeout_s
        self._began = self._said_at = self._cpu_used_at = monotonic()
        self._cpu_s = 0.0
        self._answer = folder / "answer.json"
        variant = () if target.variant is None else ("--variant", target.variant)
        self.worker = Supervised(
            (*WORKER_COMMAND, "--target", target.name, *variant, "--size", target.size, "--answer", str(self._answer)),
            folder / "log.txt",
            # Results must be the same on every machine: a real GPU is hidden, and threads do not compete.
            env={
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
                "TRITON_CACHE_DIR": str(folder / "triton"),
            },
        )

    def say_how_long(self, say: Callable[[str], None]) -> None:
        """Report progress of the target every ten seconds."""
        if (now := monotonic()) - self._said_at >= SAY_S:
            self._said_at = now
            say(f"{self.target.label}: explaining it for {now - self._began:.0f} s")

    def has_taken_too_long(self) -> bool:
        """Return whether the worker has exceeded its processor time, or has used none for so long that it hangs."""
        used, now = self.worker.cpu_seconds(), monotonic()
        if used >= self._cpu_s + 0.05:
            self._cpu_s, self._cpu_used_at = used, now
        return used >= self.timeout_s or now - self._cpu_used_at >= min(self.timeout_s, IDLE_S)

    def finish(self) -> Explanation:
        """Return the explanation after the worker has ended or taken too long, and clean up its process."""
        try:
            if self.worker.exited():
                return self._read()
            self.worker.write_tracebacks()
            if self._cpu_s >= self.timeout_s:
                return self._failed(f"the analysis took longer than {self.timeout_s:g} s of processor time")
            return self._failed(f"the analysis used no processor time for {min(self.timeout_s, IDLE_S):g} s")
        finally:
            end([self.worker])

    def _read(self) -> Explanation:
        try:
            read = WorkerAnswer.model_validate_json(self._answer.read_bytes())
        except (FileNotFoundError, ValidationError):
            return self._failed(f"the analysis {self.worker.exit_description()}")
        if read.wrong_use is not None:
            raise WrongUse(read.wrong_use)
        return read.explanation or self._failed("the analysis gave no answer")

    def _failed(self, what: str) -> Explanation:
        return unexplained(self.target, f"{what}\n{self.worker.log_tail()}".strip())


def _cores() -> int:
    return max(1, len(os.sched_getaffinity(0)))


def reusable(targets: Sequence[Target], folder: Path) -> dict[Target, Explanation]:
    """Return explanations in `folder` that this commit, unchanged, made without an error.

    Users' programs and models of TorchBench are never among them, because changes of their code are not detected.
    """
    commit, dirty = git_state(REPOSITORY)
    if commit is None or dirty:
        return {}
    own = [target for target in targets if not (target.is_program or registry.is_sourced(target.name))]
    here = (commit, False, None, version("torch"))
    return {
        target: found
        for target in own
        if (found := _read(folder / file_name(target))) is not None
        and (found.commit, found.dirty, found.error, found.torch) == here
        and found.size == target.size
    }


def _read(path: Path) -> Explanation | None:
    try:
        return Explanation.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
