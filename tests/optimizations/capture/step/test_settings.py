"""Values of Python that a step reads, in all the places where programs keep them: a change is seen, nothing else is.

Each case gives a function that the step calls, and one that changes what it will give.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import math
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy
import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import batches
from torch.utils._python_dispatch import TorchDispatchMode
from value_changes import Case, Cases

from models.precision import precision_kept
from optimizations.capture.step.graphed_step import GraphedStep

CASES = case = Cases()


class Special:
    """Read by nothing but methods that Python calls by itself."""

    def __init__(self) -> None:
        self.weight = 2.0

    def __mul__(self, other: float) -> float:
        return other * self.weight

    def __getitem__(self, index: int) -> float:
        return self.weight

    def __enter__(self) -> float:
        return self.weight

    def __exit__(self, *error: object) -> None:
        pass


class Proxy:
    def __init__(self) -> None:
        self.__dict__["store"] = {"weight": 2.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["store"][name]


class WithDefault:
    weight = 2.0


class OfClass:
    settings: ClassVar = {"weight": 2.0}

    @classmethod
    def of_class(cls) -> float:
        return cls.settings["weight"]

    def __init__(self, scale: float) -> None:
        self.made = scale * self.settings["weight"]


@case
def an_operator_of_a_class() -> Case:
    special = Special()
    return lambda: special * 1.0, lambda: setattr(special, "weight", 3.0)


@case
def an_index_of_a_class() -> Case:
    special = Special()
    return lambda: special[0], lambda: setattr(special, "weight", 3.0)


@case
def a_with_statement() -> Case:
    special = Special()

    def read() -> float:
        with special as weight:
            return weight

    return read, lambda: setattr(special, "weight", 3.0)


@case
def an_attribute_behind_getattr() -> Case:
    proxy = Proxy()
    return lambda: proxy.weight, lambda: proxy.store.update(weight=3.0)


@case
def an_attribute_that_hides_that_of_the_class() -> Case:
    held = WithDefault()
    return lambda: held.weight, lambda: setattr(held, "weight", 3.0)


@case
def an_attribute_that_may_be_missing() -> Case:
    held = types.SimpleNamespace()
    return lambda: getattr(held, "weight", 2.0), lambda: setattr(held, "weight", 3.0)


@case
def a_class_method() -> Case:
    OfClass.settings = {"weight": 2.0}
    return lambda: OfClass.of_class(), lambda: OfClass.settings.update(weight=3.0)


@case
def an_object_made_in_the_step() -> Case:
    OfClass.settings = {"weight": 2.0}
    return lambda: OfClass(1.0).made, lambda: OfClass.settings.update(weight=3.0)


@case
def a_whole_number_that_becomes_another_kind() -> Case:
    held: dict[str, Any] = {"weight": 1}
    return lambda: 2.0 if held["weight"] is True else 3.0, lambda: held.update(weight=True)


@case
def a_zero_that_changes_its_sign() -> Case:
    held = {"weight": 0.0}
    return lambda: math.copysign(2.0, held["weight"]), lambda: held.update(weight=-0.0)


@case
def a_set_of_the_same_size() -> Case:
    held = {"fast"}
    return lambda: 2.0 if "fast" in held else 3.0, lambda: (held.discard("fast"), held.add("slow"))


@case
def a_queue() -> Case:
    held = collections.deque([2.0, 3.0])
    return lambda: held[0], lambda: held.rotate()


@case
def a_user_dict() -> Case:
    held = collections.UserDict(weight=2.0)
    return lambda: held["weight"], lambda: held.update(weight=3.0)


@case
def a_chain_of_dicts() -> Case:
    held = collections.ChainMap({}, {"weight": 2.0})
    return lambda: held["weight"], lambda: held.maps[1].update(weight=3.0)  # type: ignore[attr-defined]


@case
def a_read_only_dict() -> Case:
    behind = {"weight": 2.0}
    held = types.MappingProxyType(behind)
    return lambda: held["weight"], lambda: behind.update(weight=3.0)


@case
def a_weak_reference() -> Case:
    behind = argparse.Namespace(weight=2.0)
    held = weakref.ref(behind)
    return lambda: held().weight, lambda: setattr(behind, "weight", 3.0)  # type: ignore[union-attr]


@case
def a_cached_function() -> Case:
    behind = {"weight": 2.0}

    @functools.lru_cache
    def weight() -> float:
        return behind["weight"]

    return weight, lambda: (behind.update(weight=3.0), weight.cache_clear())


@case
def a_module_that_is_imported_in_the_step() -> Case:
    settings: Any = types.ModuleType("settings_of_a_step")
    settings.weight = 2.0
    sys.modules["settings_of_a_step"] = settings

    def read() -> float:
        import settings_of_a_step  # type: ignore[import-not-found]

        return float(settings_of_a_step.weight)

    return read, lambda: setattr(settings, "weight", 3.0)


@case
def an_array_of_numpy() -> Case:
    held = numpy.array([2.0])
    return lambda: float(held[0]), lambda: held.fill(3.0)


@case
def a_default_of_a_function() -> Case:
    def read(settings: dict[str, float] = {"weight": 2.0}) -> float:  # noqa: B006
        return settings["weight"]

    return read, lambda: read.__defaults__[0].update(weight=3.0)  # type: ignore[index]


class Descriptor:
    """Gives what it keeps itself, whatever object it is asked for."""

    def __init__(self) -> None:
        self.weight = 2.0

    def __get__(self, instance: object, owner: type | None = None) -> float:
        return self.weight


class Decorated:
    """A decorator that is an object, and counts on what it keeps."""

    def __init__(self, function: Callable[..., float]) -> None:
        self.function, self.weight = function, 2.0

    def __call__(self) -> float:
        return self.function() * self.weight


@case
def a_descriptor_of_the_programs_own() -> Case:
    held = Descriptor()
    one = type("Owner", (), {"__module__": __name__, "weight": held})()
    return lambda: one.weight, lambda: setattr(held, "weight", 3.0)


@case
def an_object_in_the_place_of_a_method() -> Case:
    held = Decorated(lambda: 1.0)
    one = type("Owner", (), {"__module__": __name__, "weigh": staticmethod(held)})()
    return lambda: one.weigh(), lambda: setattr(held, "weight", 3.0)


@case
def a_partial_method() -> Case:
    settings = {"weight": 2.0}
    kind = type(
        "Owner", (), {"__module__": __name__, "weigh": functools.partialmethod(lambda self, of: of["weight"], settings)}
    )
    one = kind()
    return lambda: one.weigh(), lambda: settings.update(weight=3.0)


@case
def a_cached_property() -> Case:
    settings = {"weight": 2.0}
    found = functools.cached_property(lambda self: settings["weight"])
    kind = type("Owner", (), {"__module__": __name__, "weight": found})
    found.__set_name__(kind, "weight")
    one = kind()

    def change() -> None:
        settings.update(weight=3.0)
        vars(one).pop("weight")

    return lambda: one.weight, change


@case
def objects_that_are_referred_to_weakly() -> Case:
    held = Special()
    by_name = weakref.WeakValueDictionary(one=held)
    return lambda: by_name["one"].weight, lambda: setattr(held, "weight", 3.0)


@case
def a_variable_of_the_thread() -> Case:
    held = threading.local()
    held.weight = 2.0
    return lambda: held.weight, lambda: setattr(held, "weight", 3.0)


class Terms:
    """`epoch` counts for itself."""

    def __init__(self) -> None:
        self.alpha, self.beta, self.epoch = 1.0, 2.0, 0
        self.names = ["alpha", "beta"]
        self.weights = {"beta": 1.0}

    def change(self) -> None:
        self.beta, self.epoch = 3.0, self.epoch + 1


@case
def attributes_whose_names_stand_in_a_list() -> Case:
    terms = Terms()
    return lambda: sum(getattr(terms, name) for name in terms.names), terms.change


@case
def attributes_whose_names_are_keys() -> Case:
    terms = Terms()
    return lambda: sum(getattr(terms, name) * weight for name, weight in terms.weights.items()), terms.change


@case
def attributes_whose_names_are_keys_of_a_dict_of_attributes() -> Case:
    terms = Terms()
    return lambda: sum(vars(terms)[name] for name in terms.names), terms.change


@case
def attributes_whose_names_are_put_together() -> Case:
    given, key = argparse.Namespace(beta_weight=2.0), "beta"
    return lambda: getattr(given, f"{key}_weight"), lambda: setattr(given, "beta_weight", 3.0)


@case
def all_values_of_a_namespace() -> Case:
    given = types.SimpleNamespace(alpha=1.0, beta=2.0)
    return lambda: sum(vars(given).values()), lambda: setattr(given, "beta", 3.0)


@case
def an_attribute_of_a_tensor() -> Case:
    held: Any = torch.ones(1)
    held.weight = 2.0
    return lambda: held.weight, lambda: setattr(held, "weight", 3.0)


@pytest.fixture(autouse=True)
def without_a_module_of_settings() -> Iterator[None]:
    yield
    sys.modules.pop("settings_of_a_step", None)


UNCOMPARED = {
    "a_cached_function",
    "a_chain_of_dicts",
    "a_descriptor_of_the_programs_own",
    "a_module_that_is_imported_in_the_step",
    "a_partial_method",
    "a_read_only_dict",
    "a_variable_of_the_thread",
    "a_weak_reference",
    "all_values_of_a_namespace",
    "an_attribute_of_a_tensor",
    "an_object_in_the_place_of_a_method",
    "attributes_whose_names_are_keys",
    "attributes_whose_names_are_keys_of_a_dict_of_attributes",
    "attributes_whose_names_are_put_together",
    "attributes_whose_names_stand_in_a_list",
    "objects_that_are_referred_to_weakly",
}
"""What the contract does not list as compared."""


@pytest.mark.parametrize("name", sorted(CASES.keys() - UNCOMPARED))
def test_compared_value_is_noticed_when_it_changes(name: str) -> None:
    CASES.check(name, most_behind=6)


@pytest.mark.parametrize("name", sorted(UNCOMPARED))
def test_audit_notices_other_values(name: str) -> None:
    CASES.check_by_audit(name)


class Batch(dict[str, Any]):
    """A dict with attributes."""

    weight = 2.0


@dataclasses.dataclass
class Row:
    x: torch.Tensor
    weight: dataclasses.InitVar[float] = 2.0

    def __post_init__(self, weight: float) -> None:
        self.weight = weight  # type: ignore[misc]


GIVEN: dict[str, tuple[Callable[[torch.Tensor, Any], Any], Callable[[Any], float], Callable[[Any], Any]]] = {
    "an object in a dict": (
        lambda x, held: {"x": x, "inner": [held]},
        lambda given: given["inner"][0].weight,
        lambda held: setattr(held, "weight", 5.0),
    ),
    "an attribute of a dict": (
        lambda x, held: of_class(Batch(x=x), held.weight),
        lambda given: given.weight,
        lambda held: setattr(held, "weight", 5.0),
    ),
    "an attribute of a dataclass": (
        lambda x, held: Row(x, held.weight),
        lambda given: given.weight,
        lambda held: setattr(held, "weight", 5.0),
    ),
}


def of_class(given: Any, weight: float) -> Any:
    given.weight = weight
    return given


@pytest.mark.parametrize("name", sorted(GIVEN))
def test_what_stands_in_and_on_arguments_is_seen(name: str) -> None:
    make, read, change = GIVEN[name]
    held = Special()

    def step(given: Any) -> torch.Tensor:
        x = given.x if isinstance(given, Row) else given["x"]
        return x * read(given)  # type: ignore[no-any-return]

    call = GraphedStep(step, device=CpuDevice())
    for index in range(14):
        if index == 6:
            change(held)
        x = torch.randn(3)
        assert torch.equal(call(make(x, held)), x * held.weight)
    assert 3 + 4 <= call.report().replays <= 3 + 6
    assert call.report().refusals == ()


def test_step_is_told_whether_its_batch_is_a_parameter() -> None:
    def step(given: torch.Tensor) -> torch.Tensor:
        return given * (3.0 if isinstance(given, torch.nn.Parameter) else 2.0)

    call = GraphedStep(step, device=CpuDevice())
    for index in range(20):
        x = torch.randn(3)
        given = torch.nn.Parameter(x, requires_grad=False) if index % 2 else x
        assert torch.equal(call(given), step(given))
    assert (call.report().replays, len(call.report().recordings), call.report().refusals) == (20 - 5, 2, ())


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "vmap": lambda function, x: torch.vmap(function)(x.expand(4, 3)),
    "grad": lambda function, x: torch.func.grad(lambda y: function(y).sum())(x),
    "forward mode": lambda function, x: torch.func.jvp(function, (x,), (x,))[1],
}


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_a_step_that_is_transformed_runs_as_it_is(name: str) -> None:
    weight = torch.randn(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).square()

    call = GraphedStep(step, device=CpuDevice())
    for _ in range(5):
        call(torch.randn(3))
    x = torch.randn(3)
    assert torch.equal(TRANSFORMS[name](call, x), TRANSFORMS[name](step, x))
    call(x)
    assert call.report().replays == 3


class Counting(TorchDispatchMode):
    """As a counter of floating-point operations: it wants to see what runs."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_what_surrounds_a_call_and_watches_operators_sees_them() -> None:
    calls = batches("cpu", 8)
    step = GraphedStep(lambda batch: batch["x"].sum() * 2, device=CpuDevice())
    for batch in calls[:6]:
        step(*batch)
    assert step.report().replays == 3
    for _ in range(4):
        with Counting() as counting:
            step(*calls[6])
        assert counting.seen >= 2
    step(*calls[7])
    assert step.report().replays == 4


def test_hooks_of_saved_tensors_see_them_and_may_exchange_them() -> None:
    weight = torch.nn.Parameter(torch.arange(3.0))

    def train(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        (x * weight).sum().backward()
        assert weight.grad is not None
        return weight.grad.clone()

    step = GraphedStep(train, device=CpuDevice())
    for _ in range(6):
        assert torch.equal(step(torch.ones(3)), torch.ones(3))
    seen: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (seen.append(one), one)[1], lambda one: one * 2):
        assert torch.equal(step(torch.ones(3)), 2 * torch.ones(3))
    assert seen
    replays = step.report().replays
    assert torch.equal(step(torch.ones(3)), torch.ones(3)) and step.report().replays == replays + 1


def test_a_default_device_that_changes_is_noticed() -> None:
    step = GraphedStep(lambda batch: (batch["x"] * 2, torch.ones(2)), device=CpuDevice())
    calls = batches("cpu", 8)
    for batch in calls[:6]:
        step(*batch)
    torch.set_default_device("meta")
    try:
        _, ones = step(*calls[6])
        assert ones.device.type == "meta"
    finally:
        torch.set_default_device(None)


def test_a_backward_that_looks_for_nan_finds_it() -> None:
    weight = torch.ones(3, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        loss = (weight * x).sqrt().sum()
        loss.backward()
        return loss.detach()

    graphed = GraphedStep(step, device=CpuDevice())
    for index in range(6):
        graphed(torch.full((3,), index + 1.0))
    assert graphed.report().replays == 3
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan"):
        graphed(torch.full((3,), -1.0))
    graphed(torch.ones(3))
    assert graphed.report().replays == 4


@pytest.mark.parametrize("pair", [(0.0, -0.0), (1, True), (1, 1.0), (float("inf"), float("-inf"))])
def test_numbers_that_look_alike_have_graphs_of_their_own(pair: tuple[Any, Any]) -> None:
    def step(batch: dict[str, torch.Tensor], number: Any) -> torch.Tensor:
        sign = math.copysign(1.0, number) + (5.0 if number is True else 0.0) + isinstance(number, float)
        return batch["x"].sum() * sign

    graphed = GraphedStep(step, device=CpuDevice())
    for index, (batch,) in enumerate(batches("cpu", 16)):
        number = pair[index % 2]
        assert torch.equal(graphed(batch, number), step(batch, number))
    assert len(graphed.report().recordings) == 2


@pytest.fixture
def precision() -> Iterator[None]:
    with precision_kept():
        yield
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize(
    ("of", "name", "value"),
    [
        (torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        (torch.backends, "fp32_precision", "tf32"),
        (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    ],
)
def test_another_precision_of_products_has_a_graph_of_its_own(of: Any, name: str, value: Any) -> None:
    torch.backends.cuda.matmul.fp32_precision = "none"
    step = GraphedStep(lambda x: x * 2, device=CpuDevice())
    for index in range(12):
        if index == 6:
            setattr(of, name, value)
        x = torch.full((3,), float(index))
        assert torch.equal(step(x), x * 2)
    report = step.report()
    assert (report.refusals, len(report.recordings), report.replays) == ((), 2, 12 - 3 - 2)


def of_flags(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


CHOOSING_KERNELS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    **{f"cudnn {name}": of_flags(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")},
    "flash": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "efficient": (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    "math": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "cudnn": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "only warned of": (
        torch.is_deterministic_algorithms_warn_only_enabled,
        lambda value: torch.use_deterministic_algorithms(value, warn_only=value),
    ),
    "autocast's cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "half": (
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
}


@pytest.mark.parametrize("name", sorted(CHOOSING_KERNELS))
def test_kernel_choosing_setting_has_its_own_graph(name: str) -> None:
    ask, tell = CHOOSING_KERNELS[name]
    before = ask()
    step = GraphedStep(lambda x: x * 2, device=CpuDevice())
    try:
        for index in range(16):
            tell(before if index < 6 or index >= 12 else not before)
            x = torch.full((3,), float(index))
            assert torch.equal(step(x), x * 2)
    finally:
        tell(before)
    report = step.report()
    assert (report.refusals, len(report.recordings), report.replays) == ((), 2, 16 - 3 - 2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dtype_of_inner_regions_has_its_own_graph(device: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"):
            product = x @ x
        return product * (2 if torch.get_autocast_dtype(device) is torch.bfloat16 else 3)

    before = torch.get_autocast_dtype(device)
    step = GraphedStep(function, device=CpuDevice())
    try:
        for index in range(16):
            torch.set_autocast_dtype(device, torch.bfloat16 if index < 6 or index >= 12 else torch.float16)
            x = torch.randn(3, 3)
            found, expected = step(x), function(x)
            assert found.dtype is expected.dtype and torch.equal(found, expected)
    finally:
        torch.set_autocast_dtype(device, before)
    report = step.report()
    assert (report.refusals, len(report.recordings), report.replays) == ((), 2, 16 - 3 - 2)


@pytest.mark.parametrize("of", ["conv", "rnn"])
def test_another_precision_of_cudnn_has_a_graph_of_its_own(of: str) -> None:
    held = getattr(torch.backends.cudnn, of)
    before = held.fp32_precision
    step = GraphedStep(lambda x: x * 2, device=CpuDevice())
    try:
        for index in range(12):
            if index == 6:
                held.fp32_precision = "ieee"
            step(torch.ones(3))
    finally:
        held.fp32_precision = before
    assert before != "ieee"
    assert (len(step.report().recordings), step.report().replays) == (2, 12 - 3 - 2)


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_step_that_leaves_gradients_off_is_refused_there() -> None:
    def step(x: torch.Tensor, train: bool) -> torch.Tensor:
        torch.set_grad_enabled(train)
        return x * 2

    graphed = GraphedStep(step, device=CpuDevice())
    try:
        for index in range(20):
            train = index % 5 < 3
            graphed(torch.ones(3), train)
            assert torch.is_grad_enabled() is train
    finally:
        torch.set_grad_enabled(True)
    report = graphed.report()
    assert "leaves a setting of PyTorch other than it found it" in report.refusals[0].reason
    assert report.replays > 0


@pytest.mark.parametrize("kind", [list, lambda proxies: dict(enumerate(proxies))], ids=["list", "dict"])
def test_a_proxy_of_an_object_that_is_gone_is_nothing(kind: Any) -> None:
    held = WithDefault()
    proxies = kind([weakref.proxy(held)])
    del held

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * len(proxies)

    graphed = GraphedStep(step, device=CpuDevice())
    for index in range(5):
        assert graphed(torch.full((1,), float(index))).item() == index
