"""Values that a step reads through a class, a module, a function or a library's code: a change is seen.

Others are in `test_step_settings`.
"""

from __future__ import annotations

import array
import builtins
import configparser
import contextvars
import enum
import functools
import logging
import math
import operator
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy
import pydantic
import pytest
import torch
from graphs_on_cpu import CpuDevice
from step_parts import batches
from torch import nn
from value_changes import Case, Cases

from optimizations.capture.step.graphed_step import GraphedStep

CASES = case = Cases()


def of_attribute(read: Callable[[], Any], owner: Any) -> Case:
    """`weight` of `owner` is 2, and becomes 3."""
    return read, lambda: setattr(owner, "weight", 3.0)


def of_dict(make: Callable[[dict[str, float]], Callable[[], Any]]) -> Case:
    """What `make` gives reads the dict that it is given."""
    settings = {"weight": 2.0}
    return make(settings), lambda: settings.update(weight=3.0)


# Data that classes hold for their objects.


class Base:
    weight = 2.0

    class inner:
        weight = 2.0


class Derived(Base):
    pass


@pytest.fixture(autouse=True)
def without_a_package_of_settings() -> Iterator[None]:
    yield
    sys.modules.pop("settings_of_a_package", None)


def of_class(read: Callable[[], Any], owner: Any) -> Case:
    """As `of_attribute`, with classes as they are above."""
    Base.weight = Base.inner.weight = 2.0
    if "weight" in vars(Derived):
        del Derived.weight
    return of_attribute(read, owner)


class Meta(type):
    def weigh(cls) -> float:
        return getattr(cls, "weight", 2.0)


class OfMeta(metaclass=Meta):
    weight = 2.0


class Network(nn.Module):
    weight = 2.0
    criterion: ClassVar[nn.Module] = nn.Threshold(0.5, 2.0)

    def forward(self) -> float:
        return self.weight


@case
def a_class_through_its_object() -> Case:
    one = Base()
    return of_class(lambda: one.weight, Base)


@case
def a_class_through_that_of_an_object() -> Case:
    one = Base()
    return of_class(lambda: type(one).weight, Base)


@case
def a_base_of_a_class() -> Case:
    return of_class(lambda: Derived.weight, Base)


@case
def a_class_that_overrides_its_base_later() -> Case:
    one = Derived()
    return of_class(lambda: one.weight, Derived)


@case
def a_class_in_a_class() -> Case:
    return of_class(lambda: Base.inner.weight, Base.inner)


@case
def a_class_of_a_class() -> Case:
    OfMeta.weight = 2.0
    return of_attribute(lambda: OfMeta.weigh(), OfMeta)


@case
def a_class_of_modules() -> Case:
    Network.weight = 2.0
    module = Network()
    return of_attribute(lambda: module(), Network)


@case
def a_module_that_a_class_holds() -> Case:
    Network.criterion.value = 2.0  # type: ignore[assignment]
    zero = torch.zeros(())
    return lambda: Network.criterion(zero), lambda: setattr(Network.criterion, "value", 3.0)


# Modules of Python, and functions.


@case
def a_module_in_a_variable() -> Case:
    settings: Any = types.ModuleType("settings")
    settings.weight = 2.0
    return of_attribute(lambda: settings.weight, settings)


@case
def a_module_in_an_attribute() -> Case:
    settings: Any = types.ModuleType("settings")
    settings.weight = 2.0
    held = types.SimpleNamespace(settings=settings)
    return of_attribute(lambda: held.settings.weight, settings)


@case
def a_module_in_a_package() -> Case:
    package: Any = types.ModuleType("settings_of_a_package")
    package.training = types.ModuleType("settings_of_a_package.training")
    package.training.weight = 2.0
    sys.modules["settings_of_a_package"] = package

    def read() -> float:
        import settings_of_a_package  # type: ignore[import-not-found]

        return float(settings_of_a_package.training.weight)

    return of_attribute(read, package.training)


@case
def an_attribute_of_a_function() -> Case:
    def read() -> float:
        return read.weight  # type: ignore[attr-defined, no-any-return]

    read.weight = 2.0  # type: ignore[attr-defined]
    return of_attribute(read, read)


@case
def a_function_for_each_type() -> Case:
    def make(settings: dict[str, float]) -> Callable[[], float]:
        weigh = functools.singledispatch(lambda of: 0.0)
        weigh.register(int, lambda of: settings["weight"])
        return lambda: weigh(1)

    return of_dict(make)


@case
def a_method_for_each_type() -> Case:
    def make(settings: dict[str, float]) -> Callable[[], float]:
        found = functools.singledispatchmethod(lambda self, of: 0.0)
        found.register(int, lambda self, of: settings["weight"])
        one = type("Owner", (), {"__module__": __name__, "weigh": found})()
        return lambda: one.weigh(1)

    return of_dict(make)


@case
def a_method_of_a_dict() -> Case:
    def make(settings: dict[str, float]) -> Callable[[], float]:
        get = settings.get
        return lambda: get("weight")  # type: ignore[return-value]

    return of_dict(make)


@case
def a_getter_of_an_attribute() -> Case:
    held, get = types.SimpleNamespace(weight=2.0), operator.attrgetter("weight")
    return of_attribute(lambda: get(held), held)


@case
def a_caller_of_a_method() -> Case:
    one, call = Decided(), operator.methodcaller("weigh")
    return of_attribute(lambda: call(one), one)


class Decided:
    def __init__(self) -> None:
        self.weight = 2.0

    def weigh(self) -> float:
        return self.weight


# Classes of the program's own that inherit of a library's.


class OwnThreshold(nn.Threshold):
    """Its base reads `value`."""


FACTOR = {"weight": 2.0}
"""Named by methods that PyTorch calls, and by nothing else."""


def of_factor(read: Callable[[], Any]) -> Case:
    FACTOR["weight"] = 2.0
    return read, lambda: FACTOR.update(weight=3.0)


class OwnLoss(nn.MSELoss):
    def forward(self, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(given, wanted) * FACTOR["weight"]


class OwnConfig(configparser.RawConfigParser):
    pass


class OwnScaler(torch.amp.GradScaler):
    pass


class OwnSchedule(torch.optim.lr_scheduler.LambdaLR):
    def weigh(self) -> float:
        return float(self.get_last_lr()[0])


@case
def what_the_base_of_a_module_reads() -> Case:
    module, zero = OwnThreshold(0.5, 2.0), torch.zeros(())
    return lambda: module(zero), lambda: setattr(module, "value", 3.0)


@case
def what_an_overridden_method_reads() -> Case:
    loss, one = OwnLoss(), torch.ones(())
    return of_factor(lambda: loss(one, one * 0))


@case
def what_a_class_of_pythons_reads() -> Case:
    settings = OwnConfig()
    settings.read_dict({"step": {"weight": "2.0"}})
    return lambda: settings.getfloat("step", "weight"), lambda: settings.set("step", "weight", "3.0")


@case
def what_a_scaler_of_the_programs_own_keeps() -> Case:
    scaler = OwnScaler("cpu", growth_factor=2.0)
    return lambda: scaler.get_growth_factor(), lambda: scaler.set_growth_factor(3.0)


@case
def what_a_scheduler_of_the_programs_own_keeps() -> Case:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    schedule = OwnSchedule(optimizer, lambda epoch: 1.0 if epoch < 1 else 1.5)
    return lambda: schedule.weigh(), lambda: (optimizer.step(), schedule.step())


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x * FACTOR["weight"]

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@case
def what_a_differentiable_function_reads() -> Case:
    one = torch.ones(())
    return of_factor(lambda: OwnFunction.apply(one))


class OwnOptimizer(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.fill_(FACTOR["weight"])


@case
def what_an_optimizer_of_the_programs_own_reads() -> Case:
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = OwnOptimizer([parameter])

    def read() -> torch.Tensor:
        optimizer.step()
        return parameter.detach().clone()

    return of_factor(read)


@case
def what_a_distribution_keeps() -> Case:
    held = torch.distributions.transforms.AffineTransform(2.0, 1.0)
    return lambda: held(torch.zeros(())), lambda: setattr(held, "loc", 3.0)


# Containers with more than they contain, and what is exchanged in one.


class OwnDict(dict):  # type: ignore[type-arg]
    weight = 0.0


class OwnTuple(tuple):  # type: ignore[type-arg]
    settings: ClassVar = {"weight": 2.0}

    def weigh(self) -> float:
        return self.settings["weight"]


@case
def an_attribute_of_a_dict() -> Case:
    held = OwnDict()
    held.weight = 2.0
    return of_attribute(lambda: held.weight, held)


@case
def a_method_of_a_tuple() -> Case:
    OwnTuple.settings["weight"] = 2.0
    held = OwnTuple()
    return lambda: held.weigh(), lambda: OwnTuple.settings.update(weight=3.0)


@case
def a_dict_with_weak_keys() -> Case:
    one = Decided()
    held = weakref.WeakKeyDictionary({one: 2.0})
    return lambda: held[one], lambda: held.__setitem__(one, 3.0)


@case
def a_key_of_a_dict() -> Case:
    one = Decided()
    held = {one: 1.0}
    return of_attribute(lambda: sum(key.weight * factor for key, factor in held.items()), one)


@case
def a_part_of_a_key_of_a_dict() -> Case:
    one = Decided()
    held = {(0, frozenset([one])): 1.0}
    return of_attribute(lambda: sum(key.weight * factor for (_, (key,)), factor in held.items()), one)


class Weighed(NamedTuple):
    name: str
    by: Decided

    def weight(self) -> float:
        return self.by.weight


@case
def a_method_of_a_key_of_a_dict() -> Case:
    one = Decided()
    held = {Weighed("one", one): 1.0}
    return of_attribute(lambda: sum(key.weight() for key in held), one)


@case
def a_list_with_a_private_name_that_is_exchanged() -> Case:
    held = types.SimpleNamespace(_weights=[2.0])
    return lambda: held._weights[0], lambda: setattr(held, "_weights", [3.0])


@case
def the_environment() -> Case:
    os.environ["WEIGHT_OF_A_STEP"] = "2.0"
    return lambda: float(os.environ["WEIGHT_OF_A_STEP"]), lambda: os.environ.update(WEIGHT_OF_A_STEP="3.0")


@case
def the_environment_through_a_function_of_python() -> Case:
    os.environ["WEIGHT_OF_A_STEP"] = "2.0"
    read = os.getenv
    return lambda: float(read("WEIGHT_OF_A_STEP") or 0), lambda: os.environ.update(WEIGHT_OF_A_STEP="3.0")


class Choice(enum.Enum):
    FIRST = types.SimpleNamespace(weight=2.0)


@case
def what_a_member_of_an_enum_holds() -> Case:
    Choice.FIRST.value.weight = 2.0
    return of_attribute(lambda: Choice.FIRST.value.weight, Choice.FIRST.value)


class OwnNumber(float):
    weight: float


@case
def an_attribute_of_a_number() -> Case:
    one = OwnNumber(1.0)
    one.weight = 2.0
    return of_attribute(lambda: one.weight, one)


@case
def what_an_array_of_objects_leads_to() -> Case:
    held = numpy.array([{"weight": 2.0}, None], dtype=object)
    return lambda: held[0]["weight"], lambda: held[0].update(weight=3.0)


@case
def an_event() -> Case:
    event = threading.Event()
    return lambda: 3.0 if event.is_set() else 2.0, lambda: event.set()


@case
def a_forward_of_a_module_alone() -> Case:
    module = Network()
    return lambda: module(), lambda: setattr(module, "forward", lambda: 3.0)


@case
def a_forward_in_the_place_of_another() -> Case:
    module = nn.Identity()
    module.forward = lambda: 2.0  # type: ignore[method-assign, assignment]
    return lambda: module(), lambda: setattr(module, "forward", lambda: 3.0)


@case
def a_partial_function_of_a_module() -> Case:
    module = nn.Identity()
    module.forward = functools.partial(float, 2)  # type: ignore[method-assign]
    return lambda: module(), lambda: setattr(module, "forward", functools.partial(float, 3))


@case
def a_method_of_a_module() -> Case:
    module = nn.Identity()
    module.forward = types.MethodType(lambda self: 2.0, module)  # type: ignore[method-assign]
    return lambda: module(), lambda: setattr(module, "forward", types.MethodType(lambda self: 3.0, module))


@case
def the_length_of_a_tensor_that_no_kernel_reads() -> Case:
    held = types.SimpleNamespace(rows=torch.ones(2))
    return lambda: float(len(held.rows)), lambda: setattr(held, "rows", torch.ones(3))


@case
def whether_there_is_a_tensor() -> Case:
    settings = {"mask": torch.ones(2)}
    return lambda: 2.0 if settings["mask"] is not None else 3.0, lambda: settings.update(mask=None)


@case
def values_of_a_dict_seen_through_a_view() -> Case:
    return of_dict(lambda settings: functools.partial(sum, settings.values()))


class Private:
    __slots__ = ("__weight",)

    def __init__(self) -> None:
        self.__weight = 2.0

    def set(self) -> None:
        self.__weight = 3.0

    @property
    def weight(self) -> float:
        return self.__weight


@case
def a_private_slot() -> Case:
    one = Private()
    return lambda: one.weight, one.set


class Empty:
    __slots__ = ("first", "weight")

    def __init__(self) -> None:
        self.first = 2.0


@case
def a_slot_that_is_filled_later() -> Case:
    one = Empty()
    return lambda: getattr(one, "weight", one.first), lambda: setattr(one, "weight", 3.0)


class Settings(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    _factor: float = pydantic.PrivateAttr(2.0)


@case
def what_a_model_of_pydantic_was_given_beyond_its_fields() -> Case:
    given: Any = Settings(weight=2.0)  # type: ignore[call-arg]
    return of_attribute(lambda: given.weight, given)


@case
def a_private_attribute_of_a_model_of_pydantic() -> Case:
    given = Settings()
    return lambda: given._factor, lambda: setattr(given, "_factor", 3.0)


class Later:
    """Gets methods and attributes while it is in use."""


def of_method(make: Callable[[Any], Any], read: Callable[[Any], Any] = lambda one: one.weigh()) -> Case:
    """A method of a class gives 2, and another in its place 3."""
    kind = type("Kind", (Later,), {"weigh": make(lambda *of: 2.0), "__module__": __name__})
    one = kind()
    return lambda: read(one), lambda: setattr(kind, "weigh", make(lambda *of: 3.0))


@case
def a_method_that_is_exchanged() -> Case:
    return of_method(lambda code: code)


@case
def a_static_method_that_is_exchanged() -> Case:
    return of_method(staticmethod)


@case
def a_class_method_that_is_exchanged() -> Case:
    return of_method(classmethod)


@case
def a_property_that_is_exchanged() -> Case:
    return of_method(property, lambda one: one.weigh)


@case
def an_operator_that_is_exchanged() -> Case:
    kind = type("Kind", (Later,), {"__neg__": lambda one: 2.0, "__module__": __name__})
    one = kind()
    return lambda: -one, lambda: setattr(kind, "__neg__", lambda one: 3.0)


@case
def a_forward_of_a_class_that_is_exchanged() -> Case:
    kind = type("Kind", (nn.Module,), {"forward": lambda module: 2.0, "__module__": __name__})
    module = kind()
    return module, lambda: setattr(kind, "forward", lambda module: 3.0)


@case
def a_method_that_a_derived_class_gets_later() -> Case:
    base = type("Base", (Later,), {"weigh": lambda one: 2.0, "__module__": __name__})
    derived = type("Derived", (base,), {"__module__": __name__})
    one = derived()
    return lambda: one.weigh(), lambda: setattr(derived, "weigh", lambda one: 3.0)


@case
def a_method_next_to_data_that_is_written() -> Case:
    kind = type("Kind", (Later,), {"weigh": lambda one: 2.0, "count": 0, "__module__": __name__})
    one = kind()
    return lambda: one.weigh(), lambda: setattr(kind, "weigh", lambda one: 3.0)


@case
def an_attribute_that_a_class_gets_later() -> Case:
    kind = type("Kind", (Later,), {"__module__": __name__})
    one = kind()
    return lambda: getattr(one, "weight", 2.0), lambda: setattr(kind, "weight", 3.0)


@case
def an_attribute_that_a_module_gets_later() -> Case:
    module = types.ModuleType("settings_that_come_later")
    return lambda: 3.0 if hasattr(module, "weight") else 2.0, lambda: setattr(module, "weight", 3.0)


@case
def a_variable_that_is_defined_later() -> Case:
    scope: dict[str, Any] = {"__builtins__": __builtins__}
    exec(compile("def read():\n  try: return weight\n  except NameError: return 2.0", __file__, "exec"), scope)  # noqa: S102
    return scope["read"], lambda: scope.update(weight=3.0)


@case
def a_name_among_the_variables() -> Case:
    scope: dict[str, Any] = {"__builtins__": __builtins__}
    code = "def read(): return 3.0 if 'weight' in globals() else 2.0"
    exec(compile(code, __file__, "exec"), scope)  # noqa: S102
    return scope["read"], lambda: scope.update(weight=3.0)


@case
def a_context_variable() -> Case:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("weight", default=2.0)
    return variable.get, lambda: variable.set(3.0)


@case
def a_context_variable_that_is_set_later() -> Case:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("weight")
    return lambda: variable.get(2.0), lambda: variable.set(3.0)


@case
def an_object_in_a_context_variable() -> Case:
    held = types.SimpleNamespace(weight=2.0)
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("held", default=held)
    return lambda: variable.get().weight, lambda: setattr(held, "weight", 3.0)


@case
def a_default_of_a_named_argument() -> Case:
    def read(*, weight: float = 2.0) -> float:
        return weight

    assert read.__kwdefaults__ is not None
    return read, lambda: read.__kwdefaults__.update(weight=3.0)


def of_logger(asked: Any, changed: logging.Logger) -> Case:
    logging.getLogger("encore.steps").setLevel(logging.NOTSET)
    logging.getLogger("encore").setLevel(logging.INFO)
    return (
        lambda: 2.0 if asked.isEnabledFor(logging.DEBUG) else 1.0,
        lambda: changed.setLevel(logging.DEBUG),
    )


@case
def a_level_of_a_logger() -> Case:
    return of_logger(logging.getLogger("encore.steps"), logging.getLogger("encore.steps"))


@case
def a_level_of_the_logger_above() -> Case:
    return of_logger(logging.LoggerAdapter(logging.getLogger("encore.steps"), {}), logging.getLogger("encore"))


# Names that stand nowhere as such.


class Rates:
    of_maker = 2.0
    maker, kind = "maker", "of"


def put_together(part: str, owner: Any) -> Callable[[], float]:
    return lambda: getattr(owner, f"of_{part}")


@case
def a_name_that_is_put_together_of_a_class() -> Case:
    kind = type("Kind", (Rates,), {"__module__": __name__, "of_maker": 2.0})
    return put_together("maker", kind), lambda: setattr(kind, "of_maker", 3.0)


@case
def a_name_that_is_put_together_of_what_a_class_holds_for_an_object() -> Case:
    kind = type("Kind", (Rates,), {"__module__": __name__, "of_maker": 2.0})
    return put_together("maker", kind()), lambda: setattr(kind, "of_maker", 3.0)


@case
def a_name_that_is_put_together_and_an_object_gets_later() -> Case:
    one = Rates()
    return put_together("maker", one), lambda: setattr(one, "of_maker", 3.0)


@case
def a_name_that_is_put_together_of_texts_that_are_held() -> Case:
    one = types.SimpleNamespace(held=Rates())
    one.held.of_maker = 2.0
    return lambda: getattr(one.held, f"{one.held.kind}_{one.held.maker}"), lambda: setattr(one.held, "of_maker", 3.0)


@case
def a_name_that_no_code_could_write() -> Case:
    one = Rates()
    setattr(one, "weight.of", 2.0)
    return lambda: getattr(one, "weight.of"), lambda: setattr(one, "weight.of", 3.0)


@case
def such_a_name_among_the_attributes() -> Case:
    one = Rates()
    vars(one)["weight-of"] = 2.0
    return lambda: one.__dict__["weight-of"], lambda: vars(one).update({"weight-of": 3.0})


@case
def an_attribute_that_a_weight_gets_later() -> Case:
    model = nn.Linear(2, 2)
    return lambda: sum(getattr(one, "weight_of", 1.0) for one in model.parameters()), lambda: setattr(
        model.bias, "weight_of", 2.0
    )


@case
def an_attribute_that_a_function_gets_later() -> Case:
    def function() -> None:
        pass

    return lambda: getattr(function, "weight_of", 2.0), lambda: setattr(function, "weight_of", 3.0)


@case
def a_function_of_pythons_that_a_variable_hides_later() -> Case:
    scope: dict[str, Any] = {}
    exec("def read():\n    return abs(2.0)", scope)  # noqa: S102
    return scope["read"], lambda: scope.update(abs=lambda value: value + 1)


@pytest.fixture(autouse=True)
def without_a_number_in_libraries() -> Iterator[None]:
    yield
    for module in _LIBRARIES:
        vars(module).pop("weight_of_a_test", None)


_LIBRARIES = (builtins, math, torch, torch.utils.data)


def number_in(module: types.ModuleType, read: Callable[[], float]) -> Case:
    vars(module)["weight_of_a_test"] = 2.0
    return read, lambda: setattr(module, "weight_of_a_test", 3.0)


@case
def a_number_that_the_program_puts_into_python() -> Case:
    return number_in(builtins, lambda: weight_of_a_test)  # type: ignore[name-defined]  # noqa: F821


@case
def a_number_that_the_program_puts_into_a_module_of_pythons() -> Case:
    return number_in(math, lambda: math.weight_of_a_test)  # type: ignore[attr-defined, no-any-return]


@case
def a_number_that_the_program_puts_into_a_library() -> Case:
    return number_in(torch, lambda: torch.weight_of_a_test)


@case
def a_number_that_the_program_puts_into_a_part_of_a_library() -> Case:
    return number_in(torch.utils.data, lambda: torch.utils.data.weight_of_a_test)  # type: ignore[attr-defined, no-any-return]


@case
def a_function_in_a_library_that_the_program_exchanges() -> Case:
    torch.weight_of_a_test = lambda: 2.0  # type: ignore[attr-defined]
    return lambda: torch.weight_of_a_test(), lambda: setattr(torch, "weight_of_a_test", lambda: 3.0)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_change_is_seen(name: str) -> None:
    CASES.check(name, most_behind=8)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * getattr(scaled, "by", 1.0) + scaled.added  # type: ignore[attr-defined, no-any-return]


def test_what_the_program_keeps_in_a_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code finds the step under the name of the function. What that had before, the step has."""
    scaled.added = 1.0  # type: ignore[attr-defined]
    step: Any = GraphedStep(scaled, device=CpuDevice())
    monkeypatch.setitem(globals(), "scaled", step)
    for index in range(18):
        if index == 6:
            step.by = 2.0
        if index == 12:
            step.added = 3.0
        x = torch.randn(3)
        assert torch.equal(step(x), x * (2.0 if index >= 6 else 1.0) + (3.0 if index >= 12 else 1.0))
    assert step.report().replays >= 18 - 3 - 5 and step.report().refusals == ()
    assert vars(step).keys() - step.own_attributes == {"by", "added"}


class Scaling:
    def __init__(self) -> None:
        self.weight = torch.ones(3)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.scaled.by  # type: ignore[attr-defined, no-any-return]


class ScalingOther(Scaling):
    pass


@pytest.mark.parametrize("kind", [Scaling, ScalingOther])
def test_what_the_program_keeps_in_a_method_is_seen(kind: type[Scaling], monkeypatch: pytest.MonkeyPatch) -> None:
    """A method of Python has what its function has."""
    method: Any = GraphedStep(Scaling.scaled, device=CpuDevice())
    monkeypatch.setattr(Scaling, "scaled", method)
    method.by = 1.0
    model: Any = kind()
    for index in range(14):
        if index == 8:
            method.by = 2.0
        x = torch.randn(3)
        assert torch.equal(model.scaled(x), x * (2.0 if index >= 8 else 1.0))
    assert model.scaled.by == 2.0 and not hasattr(model.scaled, "added")
    assert model.scaled.report().replays >= 14 - 3 - 3 and model.scaled.report().refusals == ()


class Samples(torch.utils.data.Dataset[int]):
    """More than is looked through."""

    def __init__(self) -> None:
        self.items = [[index] for index in range(250_000)]

    def __len__(self) -> int:
        return len(self.items)


def test_a_loader_next_to_the_step_is_not_looked_through() -> None:
    trainer = types.SimpleNamespace(loader=torch.utils.data.DataLoader(Samples(), batch_size=100_000))
    step = GraphedStep(lambda batch: batch["x"].sum() / len(trainer.loader), device=CpuDevice())
    for batch in batches("cpu", 5):
        assert torch.equal(step(*batch), batch[0]["x"].sum() / 3)
    assert step.report().replays == 2


class Last:
    hidden: Any = None
    calls = 0


def test_a_class_keeps_the_last_result_of_each_call() -> None:
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        Last.hidden = batch["x"] * 2
        return batch["x"].sum()

    graphed = GraphedStep(step, device=CpuDevice())
    for batch in batches("cpu", 7):
        graphed(*batch)
        assert torch.equal(Last.hidden, batch[0]["x"] * 2)
    assert graphed.report().replays == 4


def test_what_a_class_holds_is_put_back_after_a_capture_that_fails() -> None:
    Last.calls = 0
    fails = array.array("i", [0])

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if fails[0]:
            fails[0] = 0
            Last.calls += 1
            raise RuntimeError("once")
        return batch["x"].sum()

    device = CpuDevice()
    graphed = GraphedStep(step, device=device)
    with pytest.warns(UserWarning, match="once"):
        for index, batch in enumerate(batches("cpu", 5)):
            fails[0] = index == 3
            assert torch.equal(graphed(*batch), batch[0]["x"].sum())
    assert (device.captures, Last.calls) == (1, 0)


def test_the_report_counts_what_each_call_compares() -> None:
    """A registry that the step names is compared with all that its entries hold."""

    class Entry:
        __slots__ = ("first", "weight")

        def __init__(self, weight: float) -> None:
            self.first, self.weight = 1.0, weight

    registry = {str(number): Entry(float(number)) for number in range(10)}
    weight = registry["3"].weight

    def watched(read: Callable[[], float]) -> int:
        step = GraphedStep(lambda x: x * read(), device=CpuDevice())
        for index in range(6):
            step(torch.full((4,), float(index)))
        (recording,) = step.report().recordings
        return recording.watched

    through_registry, taken_out = watched(lambda: registry["3"].weight), watched(lambda: weight)
    assert through_registry - taken_out >= 10, "the attribute that is named, of every entry"
    assert 0 < taken_out < 10
