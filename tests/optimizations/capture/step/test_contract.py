"""The contract of graph_step: what is compared before each replay, what the audit finds, and lines that are named."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy
import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import batches, network, training_step
from torch import nn

from optimizations.capture.step.audit import FIRST, Audits
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.report.steps import StepChanged

CALLS, CHANGED = 14, 7


class AuditedDevice(CpuDevice):
    """One with memory for audits."""

    free = None


Read = Callable[[], Any]
Case = tuple[Read, Callable[[], Any]]
"""What a step multiplies by, and what changes it."""


class Mode(enum.Enum):
    SMALL = 0.5
    LARGE = 2.0


@dataclass
class Inner:
    scale: float = 1.0
    deep: dict[str, Any] = field(default_factory=lambda: {"scale": 1.0})


@dataclass
class Settings:
    scale: float = 1.0
    mode: Mode = Mode.SMALL
    inner: Inner = field(default_factory=Inner)
    weights: list[float] = field(default_factory=lambda: [1.0, 2.0])
    pair: tuple[float, float] = (1.0, 2.0)
    name: str = "small"
    on: bool = True
    nothing: Any = None
    function: Callable[[float], float] = abs


class WithSlots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class OfClass:
    scale = 1.0


class WithProperty:
    """An object whose number is read by methods that Python calls implicitly."""

    def __init__(self) -> None:
        self._scale = 1.0

    @property
    def scale(self) -> float:
        return self._scale * 2

    def __mul__(self, other: float) -> float:
        return other * self._scale

    def __enter__(self) -> float:
        return self._scale

    def __exit__(self, *error: object) -> None:
        pass


class Proxy:
    def __init__(self) -> None:
        self.__dict__["store"] = {"scale": 1.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["store"][name]


class Scaled:
    """An object that a step makes, and a class method, that read a dict of the class."""

    held: ClassVar = {"scale": 1.0}

    @classmethod
    def of_class(cls) -> float:
        return cls.held["scale"]

    def __init__(self) -> None:
        self.scale = 2 * self.held["scale"]


CONFIG: dict[str, Any] = {"scale": 1.0, "inner": {"scale": 1.0}}
GLOBAL_SCALE = 1.0


def named_by_a_helper() -> float:
    return GLOBAL_SCALE * 2


def of(settings: Any, read: Callable[[Any], Any], change: Callable[[Any], Any]) -> Case:
    return functools.partial(read, settings), functools.partial(change, settings)


def set_to(name: str, value: Any) -> Callable[[Any], None]:
    return lambda held: setattr(held, name, value)


def put(key: Any, value: Any) -> Callable[[Any], None]:
    return lambda held: held.__setitem__(key, value)


def set_global() -> None:
    globals()["GLOBAL_SCALE"] += 1.0


AT_ONCE: dict[str, Callable[[], Case]] = {
    "an attribute": lambda: of(Settings(), lambda s: s.scale, set_to("scale", 3.0)),
    "an enum": lambda: of(Settings(), lambda s: s.mode.value, set_to("mode", Mode.LARGE)),
    "an attribute of an attribute": lambda: of(
        Settings(), lambda s: s.inner.scale, lambda s: setattr(s.inner, "scale", 3.0)
    ),
    "a dict at the third level": lambda: of(
        Settings(), lambda s: s.inner.deep["scale"], lambda s: s.inner.deep.update(scale=3.0)
    ),
    "an exchanged object": lambda: of(Settings(), lambda s: s.inner.scale, lambda s: setattr(s, "inner", Inner(3.0))),
    "a list": lambda: of(Settings(), lambda s: s.weights[1], lambda s: s.weights.__setitem__(1, 3.0)),
    "a list that grows": lambda: of(Settings(), lambda s: sum(s.weights), lambda s: s.weights.append(3.0)),
    "an exchanged list": lambda: of(Settings(), lambda s: s.weights[1], set_to("weights", [1.0, 3.0])),
    "a tuple": lambda: of(Settings(), lambda s: s.pair[1], set_to("pair", (1.0, 3.0))),
    "a string": lambda: of(Settings(), lambda s: len(s.name), set_to("name", "larger")),
    "a flag": lambda: of(Settings(), lambda s: 2.0 if s.on else 3.0, set_to("on", False)),
    "a number in the place of none": lambda: of(
        Settings(), lambda s: 1.0 if s.nothing is None else s.nothing, set_to("nothing", 3.0)
    ),
    "a function": lambda: of(Settings(), lambda s: s.function(-2.0), set_to("function", lambda value: value * 3)),
    "a slot": lambda: of(WithSlots(), lambda s: s.scale, set_to("scale", 3.0)),
    "an attribute of a class": lambda: of(OfClass(), lambda s: s.scale, lambda s: setattr(OfClass, "scale", 5.0)),
    "one that hides that of the class": lambda: of(OfClass(), lambda s: s.scale, set_to("scale", 7.0)),
    "what a property reads": lambda: of(WithProperty(), lambda s: s.scale, set_to("_scale", 3.0)),
    "what an operator reads": lambda: of(WithProperty(), lambda s: s * 1.0, set_to("_scale", 3.0)),
    "what a block reads": lambda: of(WithProperty(), contextlib.ExitStack().enter_context, set_to("_scale", 3.0)),
    "what __getattr__ reads": lambda: of(Proxy(), lambda s: s.scale, lambda s: s.store.update(scale=3.0)),
    "what may be missing": lambda: of(
        types.SimpleNamespace(), lambda s: getattr(s, "scale", 2.0), set_to("scale", 3.0)
    ),
    "what a class method reads": lambda: of(Scaled, lambda s: s.of_class(), lambda s: s.held.update(scale=3.0)),
    "what a new object reads": lambda: of(Scaled, lambda s: Scaled().scale, lambda s: s.held.update(scale=4.0)),
    "a simple namespace": lambda: of(types.SimpleNamespace(scale=1.0), lambda s: s.scale, set_to("scale", 3.0)),
    "a dict": lambda: of({"scale": 1.0}, lambda held: held["scale"], put("scale", 3.0)),
    "a dict by numbers": lambda: of({3: 1.0}, lambda held: held[3], put(3, 3.0)),
    "a dict of a dict": lambda: of(
        CONFIG, lambda held: CONFIG["inner"]["scale"], lambda h: put("scale", 3.0)(h["inner"])
    ),
    "a global": lambda: (lambda: GLOBAL_SCALE, set_global),
    "a global that a helper names": lambda: (named_by_a_helper, set_global),
    "True in the place of 1": lambda: of(Settings(), lambda s: len(str(s.scale)), set_to("scale", True)),
    "a negative zero": lambda: of(Settings(scale=0.0), lambda s: len(str(s.scale)), set_to("scale", -0.0)),
    "another tensor": lambda: of(
        types.SimpleNamespace(t=torch.ones(())), lambda s: s.t, lambda s: setattr(s, "t", torch.full((), 3.0))
    ),
    "what a default holds": lambda: of(
        Settings(), lambda s, held=CONFIG: held["scale"], lambda s: put("scale", 4.0)(CONFIG)
    ),
}


def losses(make: Callable[[], Case], *, graphed: bool, **options: Any) -> tuple[list[torch.Tensor], Any]:
    read, change = make()

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["x"].sum() * read()

    call: Any = GraphedStep(step, device=AuditedDevice(), **options) if graphed else step
    found = []
    for index, batch in enumerate(batches("cpu", CALLS)):
        if index == CHANGED:
            change()
        found.append(call(*batch))
    return found, call


def reset() -> None:
    CONFIG.update(scale=1.0, inner={"scale": 1.0})
    Scaled.held.update(scale=1.0)
    globals()["GLOBAL_SCALE"] = OfClass.scale = 1.0


@pytest.mark.parametrize("name", sorted(AT_ONCE))
def test_changed_value_is_noticed_at_once(name: str) -> None:
    reset()
    expected, _ = losses(AT_ONCE[name], graphed=False)
    reset()
    found, step = losses(AT_ONCE[name], graphed=True, check_every=None)
    assert all(map(torch.equal, found, expected))
    assert step.report().refusals == () and step.report().replays >= CALLS - 3 - 4


class Hidden:
    """An object whose number is found by a lookup without a name in code."""

    def __init__(self) -> None:
        self.levels: Any = {"a": {"b": {"c": {"d": {"scale": 1.0}}}}}

    def __getattr__(self, name: str) -> float:
        held: Any = self.__dict__["levels"]
        while "scale" not in held:
            (held,) = held.values()
        return float(held["scale"])

    def change(self) -> None:
        self.levels["a"]["b"]["c"]["d"]["scale"] = 3.0


def read_by_name(settings: Any) -> float:
    return float(getattr(settings, "".join(("a", "lp", "ha"))))


def below_the_third_level() -> Case:
    held = Hidden()
    return (lambda: held.factor), held.change


def a_name_put_together() -> Case:
    settings = types.SimpleNamespace(alpha=1.0)
    return functools.partial(read_by_name, settings), lambda: setattr(settings, "alpha", 3.0)


def an_exchanged_method() -> Case:
    class Scaling:
        def scale(self) -> float:
            return 1.0

    held = Scaling()
    return (lambda: held.scale()), lambda: setattr(Scaling, "scale", lambda self: 3.0)


NOT_COMPARED: dict[str, Callable[[], Case]] = {
    "below the third level": below_the_third_level,
    "a name that is put together": a_name_put_together,
    "an exchanged method": an_exchanged_method,
    "a set": lambda: of({1.0}, lambda held: min(held), lambda held: (held.clear(), held.add(3.0))),
    "a queue": lambda: of(collections.deque([1.0, 3.0]), lambda held: held[0], lambda held: held.rotate()),
    "an array of NumPy": lambda: of(numpy.array([1.0]), lambda held: float(held[0]), lambda held: held.fill(3.0)),
    "a namespace": lambda: of(types.SimpleNamespace(scale=1.0), lambda s: max(vars(s).values()), set_to("scale", 3.0)),
}


@pytest.mark.parametrize("name", sorted(NOT_COMPARED))
def test_audit_finds_uncompared_state(name: str) -> None:
    make = NOT_COMPARED[name]
    message = r"step\(\) ran mul\(\.\.\., 3\.0\) where its recorded graph has 1\.0 \(.*test_contract.py:"
    with pytest.raises(StepChanged, match=message):
        losses(make, graphed=True, check_every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, step = losses(make, graphed=True, check_every=1, on_change="warn")
    assert [str(one.message).partition(" Pass")[0] for one in caught if "is recorded again" in str(one.message)]
    expected, _ = losses(make, graphed=False)
    assert all(map(torch.equal, found, expected)) and step.report().replays < CALLS


def test_audited_calls_pass_where_nothing_changed() -> None:
    model = network("cpu", dropout=0.1)
    plain = network("cpu", dropout=0.1)
    options: Any = {"lr": 0.01, "fused": True}
    given = batches("cpu", 60)
    step = GraphedStep(training_step(model, torch.optim.AdamW(model.parameters(), **options)), device=AuditedDevice())
    eager = training_step(plain, torch.optim.AdamW(plain.parameters(), **options))
    found = []
    for call in (step, eager):
        torch.manual_seed(1)
        found.append([call(*batch) for batch in given])
    assert all(map(torch.equal, *found))
    (recording,) = step.report().recordings
    assert recording.audits == 2 * len(FIRST) and recording.audits_skipped == 0
    assert recording.replays == 60 - 3 - recording.audits


def test_audit_is_skipped_where_there_is_no_memory() -> None:
    step = GraphedStep(lambda batch: batch["x"].sum(), device=CpuDevice(), check_every=4)
    for batch in batches("cpu", 20):
        step(*batch)
    (recording,) = step.report().recordings
    assert recording.audits == 0 and recording.audits_skipped > 0 and recording.replays == 17


def test_audits_take_a_hundredth_of_the_time() -> None:
    audits = Audits("auto", began_s=0.0)
    now, replays = 0.0, 0
    for _ in range(20_000):
        now += 0.001
        if audits.due(replays):
            now += 0.01
            audits.took(0.01, now, replays)
        else:
            replays += 1
    assert audits.done > 6 and audits.done * 0.01 < 0.02 * now


def test_key_gives_each_value_a_recording() -> None:
    hidden = Hidden()
    phase = {"now": 0}

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["x"].sum() * hidden.factor

    graphed = GraphedStep(step, device=AuditedDevice(), key=lambda: phase["now"], check_every=None)
    for index, batch in enumerate(batches("cpu", 24)):
        phase["now"] = int(index % 12 > 5)
        hidden.levels["a"]["b"]["c"]["d"]["scale"] = 1.0 + phase["now"]
        assert torch.equal(graphed(*batch), step(*batch))
    assert len(graphed.report().recordings) == 2 and graphed.report().replays == 24 - 5


def test_key_must_return_a_comparable_value() -> None:
    graphed = GraphedStep(lambda batch: batch["x"].sum(), device=CpuDevice(), key=lambda: [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"key\(\) returned a list, which has no hash"):
        graphed(*batches("cpu", 1)[0])


class Trainer:
    def __init__(self) -> None:
        self.model: nn.Module = nn.Linear(8, 4)
        self.global_step = 0
        self.epoch = 0
        self.scale = 1.0
        self.unread = iter(range(3))

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(batch["x"]).sum().detach() * (self.scale if self.global_step >= 0 else 2.0)


def test_counter_read_by_code_is_refused_with_both_remedies() -> None:
    trainer = Trainer()
    graphed = GraphedStep(trainer.step, device=CpuDevice())
    with pytest.warns(UserWarning, match="Trainer.global_step, which changes on every call"):
        for batch in batches("cpu", 14):
            graphed(*batch)
            trainer.global_step += 1
            trainer.epoch += 1
    (refusal,) = graphed.report().refusals
    assert 'graph_step(step, ignore=("Trainer.global_step",))' in refusal.advice and "pass it as" in refusal.advice
    assert refusal.source_line is not None and refusal.source_line.endswith("in step")
    assert graphed.report().replays == 0


@pytest.mark.parametrize("value", [3, torch.ones(2), object()])
def test_attribute_that_no_code_names_may_come_in_each_call(value: Any) -> None:
    trainer = Trainer()
    graphed = GraphedStep(trainer.step, device=CpuDevice(), check_every=None)
    for index, batch in enumerate(batches("cpu", 14)):
        graphed(*batch)
        setattr(trainer, f"seen_{index}", value)
    assert graphed.report().replays == 14 - 3


def test_step_with_a_lazy_layer_compares_what_never_changed() -> None:
    """The objects that a step reaches are first read in its second call, after its code has run."""
    trainer = Trainer()
    trainer.model = nn.LazyLinear(4)
    graphed = GraphedStep(trainer.step, device=CpuDevice())
    for batch in batches("cpu", 6):
        graphed(*batch)
    assert graphed.report().not_compared == () and graphed.report().replays > 0


def test_value_named_by_code_that_runs_later_is_compared() -> None:
    trainer = Trainer()

    def factor() -> int:
        return 1 + trainer.epoch

    def step(batch: dict[str, torch.Tensor], late: bool) -> torch.Tensor:
        return batch["x"].sum() * (factor() if late else 1)

    graphed = GraphedStep(step, device=CpuDevice())
    for index, (batch,) in enumerate(batches("cpu", 36)):
        trainer.epoch = index if index < 12 else index // 8
        late = index >= 12 and index % 2 == 0
        assert torch.equal(graphed(batch, late), step(batch, late)), index
        if index == 11:
            assert graphed.report().not_compared == ("trainer.epoch",) and graphed.report().replays == 9
    report = graphed.report()
    assert report.refusals == () and report.not_compared == () and report.replays > 16


@pytest.mark.parametrize("name", ["trainer.global_step", "self.global_step", "Trainer.global_step"])
def test_ignored_counter_is_not_compared(name: str) -> None:
    trainer = Trainer()
    graphed = GraphedStep(trainer.step, device=CpuDevice(), ignore=(name,))
    for batch in batches("cpu", 14):
        graphed(*batch)
        trainer.global_step += 1
    report = graphed.report()
    assert report.not_compared == ("Trainer.global_step",) and report.replays == 14 - 3


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"key": 3}, TypeError, "key=3 must be a function"),
    ({"ignore": "trainer.step"}, TypeError, "ignore='trainer.step' must be a tuple of names"),
    ({"check_every": 0}, ValueError, "check_every=0: give 'auto'"),
    ({"check_every": "often"}, ValueError, "check_every='often': give 'auto'"),
    ({"concurrency": "on"}, ValueError, "concurrency='on' is unknown"),
    ({"on_change": "ignore"}, ValueError, "on_change='ignore' is unknown; allowed are 'raise', 'warn'"),
    ({"limit": 0}, ValueError, "limit=0"),
    ({"limit": None}, TypeError, "limit=None must be a whole number"),
]


@pytest.mark.parametrize(("options", "error", "words"), WRONG)
def test_wrong_option_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        GraphedStep(lambda x: x, device=CpuDevice(), **options)


# Lines that lead into a library.


LIBRARIES = {
    "utils/loop.py": ("edge_index[:, edge_index[0] != edge_index[1]]", "add_self_loops=False"),
    "utils/_scatter.py": ("torch.zeros(int(edge_index.max()) + 1)", "size= of a pool"),
    "utils/num_nodes.py": ("int(edge_index.max()) + 1", "num_nodes="),
}


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("file", sorted(LIBRARIES))
def test_graph_library_has_its_own_advice(file: str) -> None:
    code, advice = LIBRARIES[file]
    installed = f"/somewhere/lib/python3/site-packages/torch_geometric/{file}"
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(f"def of_the_library(edge_index): return {code}", installed, "exec"), scope)  # noqa: S102
    of_the_library = scope["of_the_library"]

    def step(edge_index: torch.Tensor) -> torch.Tensor:
        of_the_library(edge_index)
        return edge_index.sum()

    graphed = GraphedStep(step, device=CpuDevice())
    for index in range(4):
        graphed(torch.tensor([[0, 1, 2], [1, 2, index % 3]]))
    (refusal,) = graphed.report().refusals
    assert advice in refusal.advice
    assert refusal.source_line is not None and f"through torch_geometric/{file}:1" in refusal.source_line
