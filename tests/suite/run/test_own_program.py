"""Users' own programs: what `make` may return, and how it is examined, measured and judged."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.synthetic_results import cell as row_of
from fixtures.synthetic_results import environment, failed_cell
from own_programs import ReadsAValue
from tiny_cells import cell
from tiny_workloads import WholeCell

from models import registry
from models.instance import Instance, instantiate
from models.own_program import Called, WrongProgram, load
from suite.explain.records import TO_THE_END, Explanation
from suite.explain.run import explain_many
from suite.explain.targets import find_targets
from suite.explain.text import summary
from suite.measure.iteration import iteration
from suite.measure.results import State, run_checked
from suite.report.conclusion import six_lines
from suite.report.runs import Run
from suite.results.errors import WrongUse
from suite.results.schema import Status
from suite.run import asked, own_program
from suite.run.own_program import Examined, Question, examine, examine_programs
from suite.worker.protocol import Inaccurate

__all__ = ["cell"]


def built(name: str) -> Instance:
    return instantiate(registry.find(f"own_programs:{name}"), device="cpu", seed=3)


@pytest.mark.parametrize(
    ("name", "properties"),
    [("inference", ("inference", 16, "fp32", None)), ("with_options", ("training", 16, "amp-bf16", 0.25))],
)
def test_options_of_a_program_reach_its_workload(name: str, properties: tuple[object, ...]) -> None:
    instance = built(name)
    workload = instance.workload
    assert (workload.task, workload.batch, workload.dtype_policy, workload.tolerance) == properties
    assert instance.module.training is (workload.task == "training")


@pytest.mark.parametrize(("name", "kept"), [("training", 12), ("trainer", 8)])
def test_step_restarts_from_its_state(name: str, kept: int) -> None:
    """Parameters and moments are restored, so that every mode takes the same step."""
    instance = built(name)
    assert isinstance(instance.module, Called)
    assert len(list(instance.module.state())) >= kept
    inputs = instance.inputs(0)
    state = State(instance.module, inputs)
    iterate = iteration(instance, instance.module, marks_steps=False)
    before = [tensor.detach().clone() for _, tensor in instance.module.state()]
    first, second = (run_checked(instance, iterate, inputs, state, 5) for _ in range(2))
    assert first.digest() == second.digest()
    assert any("weight" in name for name in first.tensors), "the step's changes are among its results"
    after = [tensor for _, tensor in instance.module.state()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_state_that_a_call_replaces_is_restored() -> None:
    """A compiled optimizer replaces its counts of steps by tensors on the GPU."""
    instance = built("training")
    assert isinstance(instance.module, Called)
    (optimizer,) = instance.module.optimizers
    inputs = instance.inputs(0)
    state = State(instance.module, inputs)
    iterate = iteration(instance, instance.module, marks_steps=False)

    def replacing(given: Any) -> Any:
        for kept in optimizer.state.values():
            kept["step"] = kept["step"].clone()
        return iterate(given)

    expected, found, again = (run_checked(instance, run, inputs, state, 5) for run in (iterate, replacing, replacing))
    assert any(name.endswith("step") for name in found.tensors)
    assert expected.digest() == found.digest() == again.digest()


def test_step_receives_the_batches() -> None:
    instance = built("training")
    batches = [instance.inputs(index).args[0][0] for index in range(3)]
    assert len({tensor.data_ptr() for tensor in batches}) == 3
    assert not torch.equal(batches[0], batches[1])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("returns_a_number", ("returned int", "(step, batches)")),
        ("with_unknown_dtype", ("'int3'", "amp-bf16")),
        ("with_unknown_name", ("'tolerence'", "tolerance")),
        ("with_no_batch", ("batches is empty",)),
    ],
)
def test_wrong_make_names_what_is_allowed(name: str, words: tuple[str, ...]) -> None:
    with pytest.raises(WrongProgram) as raised:
        load(f"own_programs:{name}")()
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("computes_something_else_each_time", ("with the same seed", "torch.manual_seed")),
        ("with_wrong_shapes", ("calling it as it is failed", "own_programs.py:", "cannot be multiplied")),
        ("returns_a_number", ("returned int",)),
    ],
)
def test_examining_a_bad_program_gives_a_sentence(name: str, words: tuple[str, ...]) -> None:
    problem = own_program._examined(Question(f"own_programs:{name}", "cpu", 7)).problem
    assert problem is not None and all(word in problem for word in words)


@pytest.mark.parametrize(
    ("name", "task", "stochastic"),
    [("function", "inference", False), ("training", "training", False), ("training_with_dropout", "training", True)],
)
def test_examining_finds_task_and_randomness(name: str, task: str, stochastic: bool) -> None:
    found = own_program._examined(Question(f"own_programs:{name}", "cpu", 7))
    assert (found.problem, found.task, found.stochastic) == (None, task, stochastic)


def test_lack_of_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr("models.instance.instantiate", full)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"total_memory": 2**33}))
    problem = own_program._examined(Question("own_programs:inference", "cpu", 7)).problem
    assert problem is not None and "does not fit" in problem and "8.0 GiB" in problem


def test_examine_limits_time_and_not_idleness(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may load its weights over a network, and may use many threads."""
    monkeypatch.chdir(Path(__file__).parents[2] / "support")
    monkeypatch.setattr(asked, "IDLE_S", 0.5)
    said: list[str] = []
    assert examine(Question("own_programs:waits", "cpu", 7), said.append) == Examined(batch=16)
    assert said and "own_programs:waits" in said[0]
    monkeypatch.setattr(own_program, "TIMEOUT_S", 1.0)
    assert "running it as it is took longer than 1 s" in (
        examine(Question("own_programs:waits", "cpu", 7), print).problem or ""
    )


def test_bad_program_is_wrong_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_program, "examine", lambda *_: Examined(problem="mine:make does not fit"))
    with pytest.raises(WrongUse, match="does not fit"):
        examine_programs(["mine:make"], "cpu", 7, print)


def test_examined_program_is_found_with_its_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_PROGRAMS", {})
    monkeypatch.setattr(own_program, "examine", lambda *_: Examined(task="training", batch=3, stochastic=True))
    said: list[str] = []
    examine_programs(["mine:make"], "cpu", 7, said.append)
    found = registry.find("mine:make")
    assert (found.task, found.batch, found.stochastic) == ("training", 3, True)
    assert "draws random numbers" in said[0]


@pytest.mark.parametrize("name", ["inference", "function", "training", "trainer", "training_with_dropout"])
def test_compiled_program_agrees_with_eager(cell: Callable[..., WholeCell], name: str) -> None:
    spec = {"size": "full", "stochastic": "dropout" in name}
    prepared = cell(f"own_programs:{name}", "compile", spec=spec).prepare()
    assert prepared.correctness is not None and prepared.correctness.passed
    assert prepared.correctness.compared_tensors >= (1 if name in ("inference", "function") else 9)


def test_wrong_step_is_inaccurate(cell: Callable[..., WholeCell], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that leaves the optimizer out changes no parameter."""

    def without_optimizer(mode: object, module: Called) -> Callable[..., object]:
        def call(batch: object) -> object:
            for optimizer in module.optimizers:
                monkeypatch.setattr(optimizer, "step", lambda: None)
            return module(batch)

        return call

    monkeypatch.setattr("suite.worker.compilation.callable_for", without_optimizer)
    with pytest.raises(Inaccurate):
        cell("own_programs:trainer", "compile").prepare()


BROKEN = [failed_cell("mine:make", mode, Status.COMPILE_ERROR, "no such operator") for mode in ("compile", "encore")]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (
            {"compile": 200.0, "graph": 150.0, "encore": 100.0},
            {
                "over compile": "Encore is 2.0",
                "over stock's graphs": "Encore is 1.5",
                "what to do": 'backend="encore"',
                "start": "not measured",
            },
        ),
        ({}, {"what to do": "torch.compile itself cannot run it (compile_error: no such operator)"}),
        (dict.fromkeys(("compile", "graph", "encore"), 100.0), {"what to do": "stay with torch.compile"}),
        ({"compile": 100.0}, {"what to do": "no mode with Encore"}),
    ],
)
def test_six_lines_say_what_to_do(times: dict[str, float], expected: dict[str, str]) -> None:
    settings = {"workloads": ["mine:make"], "modes": ["compile", "graph", "encore"]}
    rows = [row_of("mine:make", mode, us) for mode, us in times.items()] or BROKEN
    lines = six_lines(Run(environment(settings=settings), tuple(rows)), "mine:make")
    found = dict(line.split(": ", 1) for line in lines)
    assert len(lines) == len(found) == 6
    assert {name: words for name, words in expected.items() if words not in found[name]} == {}


@pytest.fixture
def explained(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(Path(__file__).parents[2] / "support")
    return lambda name: next(explain_many(find_targets([f"own_programs:{name}"])))[1]


def test_explain_sees_the_optimizer_of_a_step(explained: Callable[[str], Explanation]) -> None:
    explanation = explained("training")
    assert explanation.error is None
    assert (explanation.task, explanation.seen) == ("training", TO_THE_END)
    assert any("backward graphs" in limit for limit in explanation.limits)
    lines = [node.source_line or "" for graph in explanation.graphs for node in graph.placement.cpu_nodes_before]
    assert any("optim/adam.py" in line for line in lines), "Adam counts its steps on the CPU"


@pytest.mark.parametrize("name", ["function_of_two", "forward_alone"])
def test_explain_calls_a_forward_inference(name: str, explained: Callable[[str], Explanation]) -> None:
    explanation = explained(name)
    assert (explanation.error, explanation.task, explanation.seen) == (None, "inference", TO_THE_END)
    assert not any("backward graphs" in limit for limit in explanation.limits)
    assert all(graph.stock_captures for graph in explanation.graphs)


def test_explain_names_the_last_line_it_reached(explained: Callable[[str], Explanation]) -> None:
    explanation = explained("reads_a_value")
    line = inspect.getsourcelines(ReadsAValue.forward)[1] + 2
    assert explanation.seen == f"seen up to tests/support/own_programs.py:{line}; 5 of 6 layers after it are not"
    assert summary(explanation).endswith(explanation.seen)


def test_explain_ends_where_a_program_needs_a_gpu(explained: Callable[[str], Explanation]) -> None:
    explanation = explained("recurrent")
    assert explanation.error is None
    assert any("the program needs a GPU" in limit for limit in explanation.limits)
    assert explanation.seen is not None and explanation.seen.startswith("seen up to ")
