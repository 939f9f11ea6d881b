"""Explain one target in a separate process: `python -m suite.explain.worker`, started by `suite.explain.run`.

It replaces PyTorch's queries of the GPU, which cannot be undone completely, and runs users' code; so it explains one
target and ends. The answer is a JSON file; everything printed is log output.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import signal
import warnings
from pathlib import Path

from encore.own_packages import give_way
from models import registry
from suite.explain.build import Program, build_program, build_workload, load_program
from suite.explain.capture import TracedCall, capture, user_place
from suite.explain.records import Explanation, WorkerAnswer
from suite.explain.targets import Target, unexplained
from suite.results.errors import WrongUse
from suite.results.store import write_atomically
from suite.run.supervise import end_with_parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="suite.explain.worker", description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="a workload's acronym, or module:callable")
    parser.add_argument("--variant", help="a variant of the workload")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--answer", type=Path, required=True, help="the file to write")
    options = parser.parse_args()
    end_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    try:
        answer = WorkerAnswer(explanation=explain(Target(options.target, options.variant, options.size)))
    except WrongUse as error:
        answer = WorkerAnswer(wrong_use=str(error))
    write_atomically(options.answer, answer.model_dump_json().encode())


def explain(target: Target) -> Explanation:
    """Explain `target` in this process, which should be used for nothing else afterwards.

    Raises:
        WrongUse: the target is not a program.
    """
    training = False
    try:
        program = _build(target)
        found = capture(program)
        training = program.training and (not program.is_step or found.differentiated)
    except WrongUse:
        raise
    except Exception as failure:
        found = TracedCall(failure=failure)
    made = {"graphs": found.graphs, "breaks": found.breaks, "limits": found.limits, "seen": found.seen}
    if training:
        made["task"] = "training"
    return unexplained(target, None if found.failure is None else _describe(found.failure)).model_copy(update=made)


def _describe(failure: Exception) -> str:
    """Describe the error and the user's line; of Dynamo's long messages only the part about the program."""
    place = user_place(failure)
    text = str(failure).partition("\n  Hint:")[0].partition("\nfrom user code:")[0].strip()
    return f"{type(failure).__name__}: {text}" + (f" ({place})" if place else "")


def _build(target: Target) -> Program:
    if target.is_program:
        give_way()
        return build_program(load_program(target.name))
    return build_workload(registry.find(target.name), variant=target.variant, size=target.size)


if __name__ == "__main__":
    main()
