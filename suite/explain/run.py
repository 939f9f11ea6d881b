"""Explain targets, each in its own process, so that their side effects and failures do not affect the caller.

This module does not import torch. For a worker that crashes, hangs or is killed the explanation has `error` set, and
the others continue.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path

from encore.own_packages import script
from models import registry
from suite.explain.records import Explanation, WorkerAnswer
from suite.explain.targets import Target, unexplained
from suite.results.errors import WrongUse
from suite.results.store import make_folder, write_atomically
from suite.run.asked import ask

WORKER_COMMAND = script("suite.explain.worker")
TIMEOUT_S = 900.0
"""Limit of one target's processor time."""


def explain_many(
    targets: Sequence[Target],
    *,
    out: Path | None = None,
    timeout_s: float = TIMEOUT_S,
    say: Callable[[str], None] = lambda line: None,
) -> Generator[tuple[Target, Explanation], None, None]:
    """Explain targets, as many at a time as there are cores, yielding each when it is done.

    With `out`, each is written to `<name>.json` there at once (`<name>-<variant>.json` for a variant that is not the
    workload's default). Closing the iterator ends running workers. `say` is called with a line every ten seconds.

    Raises:
        WrongUse: a program is not of a form that `targets` describes.
        OSError: a file cannot be written.
    """
    if out is not None:
        make_folder(out)
    answers = ask(
        WORKER_COMMAND, targets, WorkerAnswer,
        jobs=max(1, len(os.sched_getaffinity(0))),
        timeout_s=timeout_s,
        say=lambda target, seconds: say(f"{target.label}: explaining it for {seconds:.0f} s"),
        no_gpu=True,
    )  # fmt: skip
    with closing(answers):
        for target, answer in answers:
            if isinstance(answer, str):
                answer = WorkerAnswer(explanation=unexplained(target, f"the analysis {answer}"))
            if answer.explanation is None:
                raise WrongUse(answer.wrong_use)
            if out is not None:
                write_atomically(out / file_name(target), answer.explanation.model_dump_json(indent=1) + "\n")
            yield target, answer.explanation


def file_name(target: Target) -> str:
    """Return the file of a target's explanation."""
    stem = target.name.replace(":", ".")
    is_default = target.variant is None or target.variant == registry.planned(target.name).variants[0]
    return f"{stem}.json" if is_default else f"{stem}-{target.variant}.json"
