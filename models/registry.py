"""Register workloads, by decorator, as declarative records.

A `Workload` says what a published benchmark row is (batch, dtype policy, task) and names the functions that build its
module and its inputs. Nothing is built, and nothing heavy imported, until `models.instance.instantiate` is called.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

Task = Literal["inference", "training"]
Size = Literal["full", "tiny"]
DtypePolicy = Literal["bf16", "fp16", "fp32", "amp", "amp-bf16"]
"""bf16, fp16, fp32: weights and floating inputs are of this dtype. amp: float32 weights under CUDA autocast to float16
(on a CPU bfloat16), no gradient scaler. amp-bf16: the same with autocast to bfloat16 everywhere."""

CUDNN_NOTE = "cuDNN does not measure its algorithms, as the published runner lets it: each process would draw its own"
"""The remark on workloads whose convolutions cuDNN would tune in each process."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Hold the arguments of one call. Tensors may be on any device, as the program requires."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


Builder = Callable[..., "torch.nn.Module"]
InputMaker = Callable[[str, Size, "torch.Generator"], Inputs]


@dataclass(frozen=True, slots=True)
class Sharding:
    """Describe how a workload is split over several GPUs (tensor parallelism), one process per GPU.

    Attributes:
        shard: splits a module in place over a device mesh of one dimension. The module is the same on all processes,
            and so are its results.
        batch: samples per iteration where it is run on several GPUs, whatever their number.
        inputs: those of such a run; all processes have the same.
        kept: output -> what of it is compared, where copying all of it would take minutes. None: all of it.
    """

    shard: Callable[[torch.nn.Module, DeviceMesh], None]
    batch: int
    inputs: InputMaker
    kept: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Describe one row of the workload table.

    Attributes:
        acronym: the papers' short name ("XLNET-I"), the key on the command line.
        name: the model's name in its suite ("XLNetLMHeadModel").
        suite: where the model comes from: "huggingface", "torchbench", "timm", "torchvision", "encore".
        batch: samples per iteration as the papers count them.
        build: (variant, size) -> module with random weights on the default device (the CPU, but for shape-only
            builds), float32 (or as published).
        inputs: (variant, size, generator) -> inputs on the default device (where the program will run) in their
            published dtypes, before the policy is applied. Nothing but `generator` may decide their values. A tensor
            that the published program takes from the CPU is made with an explicit device="cpu".
        loss: output -> scalar tensor. Of Hugging Face models the loss the model returns, else the mean (see workloads).
        compared: output -> what of it is compared with eager. None: all of it. For programs that choose among nearly
            equal values, where rounding decides which: what is right then is a matter of luck.
        variants: names this workload can be built as; the first is the default.
        parameters: parameter count of the full size of the default variant, as published.
        stochastic: whether an iteration draws random numbers (dropout in training, noise).
        tried_deterministic: its trials use deterministic algorithms, where PyTorch has them. For stochastic programs
            whose results hang on rounding so much that the order of atomic additions shows: the trials of all modes
            have the same bits then, and the first comparison counts for all.
        host_draws_unused: its iteration draws random numbers on the host that decide nothing, so that one graph may
            stand for it.
        optimizer: "sgd" or "adam" (training only), as in the papers.
        gradients_in_inference: gradients are enabled in its inference, because its forward differentiates.
        float32_on_cpu: on a CPU the program is float32 instead, because operators of its dtype are missing there.
        builds_on_device: the builder makes the module where it will run, instead of its being moved there afterwards:
            it takes the device as a third argument, and no default device is set around it.
        sharding: how it is split over several GPUs; None: it is not.
        tp: over how many GPUs this very row is split (see `sharded`); None: it is not such a row.
        kept: see `Sharding`.
        own: builds a program of the user's own on a device: its complete record, and its module. Dtypes, modes and
            devices stay as the program has them. None: this is a workload of the suite.
        inputs_at: index -> arguments of the call of this number, in place of `inputs`.
        is_step: its module's call is a whole training step, with backward and optimizer.
        tolerance: largest relative error that needs no explanation; None: that of the dtype.
        sets: names of the sets this row belongs to, by which several are chosen at once (`--set`).
        notes: what is special, for `encore list` and reports.
    """

    acronym: str
    name: str
    suite: str
    task: Task
    batch: int
    dtype_policy: DtypePolicy
    build: Builder
    inputs: InputMaker
    loss: Callable[[Any], torch.Tensor] | None = None
    compared: Callable[[Any], Any] | None = None
    variants: tuple[str, ...] = ("published",)
    parameters: int | None = None
    stochastic: bool = False
    tried_deterministic: bool = False
    host_draws_unused: bool = False
    optimizer: Literal["sgd", "adam"] | None = None
    gradients_in_inference: bool = False
    float32_on_cpu: bool = False
    builds_on_device: bool = False
    sharding: Sharding | None = None
    tp: int | None = None
    kept: Callable[[Any], Any] | None = None
    own: Callable[[Any], tuple[Workload, torch.nn.Module]] | None = None
    inputs_at: Callable[[int], Inputs] | None = None
    is_step: bool = False
    tolerance: float | None = None
    sets: tuple[str, ...] = ()
    notes: str = ""

    @property
    def enables_gradients(self) -> bool:
        """Return whether autograd follows its calls."""
        return self.task == "training" or self.gradients_in_inference


class UnknownWorkload(LookupError):
    """Report that there is no workload of this name, or no set; the message gives the nearest ones."""


ALL = "all"
"""The set of every registered workload."""

DEFAULT_SET = "grace"
"""What is meant where neither workloads nor a set are named: the 25 workloads of GraCE (OSDI 2026)."""


_REGISTRY: dict[str, Workload] = {}

_PROGRAMS: dict[str, Workload] = {}

_SOURCES = {"torchbench": "models.torchbench"}
"""Modules by prefix: `prefix:name` is found by the function `workload(name)` of the module."""

_LISTS = {"torchbench": "models.torchbench_models"}
"""Modules by set: the function `listed()` of the module lists the workloads of an external source."""


def register(*, inputs: InputMaker, **fields: Any) -> Callable[[Builder], Builder]:
    """Return a decorator that registers a builder as a workload; keywords are the other fields of `Workload`.

    Decorators may be stacked where several rows share a model. A second workload of one acronym is an error.
    """

    def decorate(build: Builder) -> Builder:
        workload = Workload(build=build, inputs=inputs, **fields)
        if workload.acronym in _REGISTRY:
            raise ValueError(f"workload {workload.acronym!r} is registered twice; acronyms must be unique")
        _REGISTRY[workload.acronym] = workload
        return build

    return decorate


def workloads() -> dict[str, Workload]:
    """Return all registered workloads by acronym, in alphabetical order. Imports the defining modules, but no torch."""
    package = importlib.import_module("models.workloads")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"models.workloads.{module.name}")
    return dict(sorted(_REGISTRY.items()))


def sets() -> dict[str, list[Workload]]:
    """Return the workloads of each set, `ALL` among them, in alphabetical order."""
    every = list(workloads().values())
    names = sorted({name for workload in every for name in workload.sets})
    return {name: [workload for workload in every if name in workload.sets] for name in names} | {ALL: every}


def find_set(name: str) -> list[Workload]:
    """Return the workloads of this set (any case). That of a source outside the suite holds what is installed there.

    Raises:
        UnknownWorkload: there is no such set, or nothing installed; the message names what there is, or what to do.
    """
    if name.lower() in _LISTS:
        return _listed(name.lower())
    known = sets()
    if name.lower() not in known:
        raise UnknownWorkload(f"unknown set {name!r}; known: {', '.join([*known, *_LISTS])}")
    return known[name.lower()]


def _listed(source: str) -> list[Workload]:
    found: list[Workload] = importlib.import_module(_LISTS[source]).listed()
    return found


def is_set(name: str) -> bool:
    """Return whether `find_set` knows this name, in any case."""
    return name.lower() in _LISTS or name.lower() in sets()


def planned(acronym: str) -> Workload:
    """Return the workload of an acronym that a run, or an analysis of many, is to hold.

    One of a source outside is not imported, if it is listed there: whether it can be built is for its own process to
    tell.

    Raises:
        UnknownWorkload: as `find` does.
    """
    source = acronym.partition(":")[0].lower()
    if is_sourced(acronym) and source in _LISTS:
        with contextlib.suppress(UnknownWorkload):  # `find` has a better message
            for workload in _listed(source):
                if workload.acronym == acronym:
                    return workload
    return find(acronym)


TP_MARK = "@tp"
"""Between a workload's acronym and the number of GPUs it is split over: "XLNET-I@tp2"."""

MOST_GPUS = 64
"""More than a host has."""


def sharded(workload: Workload, degree: int) -> Workload:
    """Return a workload's row split over `degree` GPUs, with the batch that such runs have. 1: the same on one GPU.

    Raises:
        UnknownWorkload: it is not split over GPUs, or not over so many; the message names those that are.
    """
    if workload.sharding is None:
        known = ", ".join(row.acronym for row in workloads().values() if row.sharding is not None)
        raise UnknownWorkload(f"{workload.acronym} cannot be split over GPUs; {known} can")
    if not 1 <= degree <= MOST_GPUS:
        raise UnknownWorkload(f"{workload.acronym}{TP_MARK}{degree}: a number of GPUs is from 1 to {MOST_GPUS}")
    return replace(
        workload,
        acronym=f"{workload.acronym}{TP_MARK}{degree}",
        batch=workload.sharding.batch,
        inputs=workload.sharding.inputs,
        kept=workload.sharding.kept,
        tp=degree,
        sets=(),
    )


def is_program(name: str) -> bool:
    """Return whether a name is that of a user's program: `module:callable`, but not `torchbench:NAME`."""
    return ":" in name and not is_sourced(name)


def add_program(workload: Workload) -> None:
    """Register the record of a program for `find`, in a process that does not build it."""
    _PROGRAMS[workload.acronym] = workload


def is_sourced(name: str) -> bool:
    """Return whether a name has the prefix of a source outside the suite, as "torchbench:resnet50" has."""
    prefix, colon, _ = name.partition(":")
    return bool(colon) and prefix.lower() in _SOURCES


def find(acronym: str) -> Workload:
    """Return the workload of this acronym (any case) or name.

    A name has a prefix ("torchbench:resnet50-train"), or is split over GPUs ("XLNET-I@tp2").

    Raises:
        UnknownWorkload: there is none; the message names the nearest matches.
    """
    if is_program(acronym):
        known_program = _PROGRAMS.get(acronym)
        if known_program is None:
            known_program = importlib.import_module("models.own_program").workload(acronym)
        return known_program
    prefix, _, name = acronym.partition(":")
    if is_sourced(acronym):
        return importlib.import_module(_SOURCES[prefix.lower()]).workload(name)
    whole, mark, degree = acronym.lower().partition(TP_MARK)
    if mark:
        if not degree.isascii() or not degree.isdigit():
            raise UnknownWorkload(f"{acronym!r}: after {TP_MARK} stands a number of GPUs, as in XLNET-I{TP_MARK}2")
        return sharded(find(whole), int(degree))
    known = workloads()
    by_upper = {key.upper(): value for key, value in known.items()}
    if acronym.upper() in by_upper:
        return by_upper[acronym.upper()]
    near = difflib.get_close_matches(acronym.upper(), by_upper, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known)}"
    raise UnknownWorkload(f"unknown workload {acronym!r}; {hint}")
