"""Explain one target in a separate process: `python -m suite.explain.worker`, started by `suite.explain.run`.

It replaces PyTorch's queries of the GPU, which cannot be undone completely, and runs users' code; so it explains one
target and ends.
"""

from __future__ import annotations

from encore.own_packages import give_way
from models import registry
from models.own_program import WrongProgram, load
from suite.explain.build import Program, build_program, build_workload
from suite.explain.capture import TracedCall, capture, user_place
from suite.explain.records import WorkerAnswer
from suite.explain.targets import Target, unexplained
from suite.results.errors import WrongUse
from suite.run.asked import answer


def explain(target: Target) -> WorkerAnswer:
    """Explain `target` in this process, which should be used for nothing else afterwards."""
    trains = False
    try:
        program = _build(target)
        found = capture(program)
        trains = target.is_program and program.with_gradients and (not program.is_step or found.differentiated)
    except (WrongUse, WrongProgram) as error:
        return WorkerAnswer(wrong_use=str(error))
    except Exception as failure:
        found = TracedCall(failure=failure)
    made = {"graphs": found.graphs, "breaks": found.breaks, "limits": found.limits, "seen": found.seen}
    if trains:
        made["task"] = "training"
    described = None if found.failure is None else _describe(found.failure)
    return WorkerAnswer(explanation=unexplained(target, described).model_copy(update=made))


def _describe(failure: Exception) -> str:
    """Describe the error and the user's line; of Dynamo's long messages only the part about the program."""
    place = user_place(failure)
    text = str(failure).partition("\n  Hint:")[0].partition("\nfrom user code:")[0].strip()
    return f"{type(failure).__name__}: {text}" + (f" ({place})" if place else "")


def _build(target: Target) -> Program:
    if target.is_program:
        give_way()
        return build_program(load(target.name))
    return build_workload(registry.find(target.name), variant=target.variant, size=target.size)


if __name__ == "__main__":
    answer(Target, explain)
