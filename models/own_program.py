"""Run a user's program, named `module:callable`, as a workload.

Note [Programs]. `module` is imported as `python -m` imports it, with the working directory first. `callable` takes no
argument and returns one of

* `(module, args)` or `(module, args, kwargs)`: inference. `module` is an `nn.Module`, in the second form any callable,
  in the first a function that takes so many arguments and not one alone;
* an `nn.Module` with a method `example_inputs()` that returns the positional arguments;
* `(step, batches)`: training. `step` is a function of one batch that runs forward, backward and the optimizer;
  `batches` is a sequence or an iterable of batches, of which the first ones with equal shapes are used;
* an object or a mapping with these names (`module`, `args`, `kwargs`, or `step`, `batches`) and options:
  `loss` (output -> scalar: the module trains, and the loss is differentiated), `tolerance` (largest relative error),
  `dtype` (bf16, fp16, fp32, or amp and amp-bf16, which put autocast around the call), `inputs` (index -> args, or
  (args, kwargs): what is passed in the call of this number).

Dtypes, train or eval mode, and devices stay as the program has them. If nothing is on a GPU, all of it is moved there.

Note [Inputs of one's own]. Without `inputs` and with one set of arguments, the other sets are copies that are rolled by
one more sample along the first dimension. Where that has size 1, numbers of floating type are scaled instead.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from models.nests import map_tensors, tensors_of
from models.registry import DtypePolicy, Inputs, Workload

SHAPE = (
    "return (module, args), (module, args, kwargs), (step, batches) for a training step, an nn.Module that has "
    "example_inputs(), or an object with these names"
)
NAMES = ("module", "args", "kwargs", "step", "batches")
OPTIONS = ("loss", "tolerance", "dtype", "inputs")
MOST_BATCHES = 8


class WrongProgram(ValueError):
    """Report that the name is not that of a program, with what is allowed and advice."""


@dataclass(frozen=True)
class Made:
    """Hold the checked return value of `make`.

    Attributes:
        call: the module, or the function; of training the step.
        sets: arguments of the calls that were given, at least one.
        is_step: whether `call` is a training step, which runs backward and optimizer by itself.
    """

    call: Callable[..., Any]
    sets: list[Inputs]
    is_step: bool = False
    loss: Callable[[Any], torch.Tensor] | None = None
    tolerance: float | None = None
    dtype: DtypePolicy | None = None
    inputs: Callable[[int], Any] | None = None


class Called(nn.Module):
    """Wrap a function as a module, with the modules and optimizers that it uses, so that their state is known."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call
        self.optimizers: list[torch.optim.Optimizer] = []
        for name, found in used_by(call):
            if isinstance(found, nn.Module):
                if found not in self.children():
                    self.add_module(name if not hasattr(self, name) else f"{name}_", found)
            elif found not in self.optimizers:
                self.optimizers.append(found)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that a call may change: parameters, buffers, and optimizers' state."""
        yield from self.named_parameters()
        yield from self.named_buffers()
        for number, optimizer in enumerate(self.optimizers):
            for place, kept in enumerate(optimizer.state.values()):
                for name, value in kept.items():
                    if isinstance(value, torch.Tensor):
                        yield f"optimizer {number}, parameter {place}, {name}", value

    def __deepcopy__(self, memo: Any) -> Called:
        raise TypeError("a function cannot be copied with the modules that it uses")


def used_by(call: Callable[..., Any]) -> Iterator[tuple[str, nn.Module | torch.optim.Optimizer]]:
    """Yield the modules and optimizers in a function's closure, defaults, globals, bound object and partial arguments.

    Functions that it uses are followed.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("step", call)]
    while waiting:
        name, value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module | torch.optim.Optimizer):
            yield name, value
        elif isinstance(value, list | tuple):
            waiting += [(f"{name}{index}", each) for index, each in enumerate(value)]
        elif isinstance(value, Mapping):
            waiting += [(str(key), each) for key, each in value.items()]
        elif isinstance(value, functools.partial):
            waiting += [("step", value.func), ("argument", value.args), ("argument", value.keywords)]
        elif callable(value):
            waiting += _names_in(value)


def _names_in(call: Any) -> Iterator[tuple[str, Any]]:
    owner = getattr(call, "__self__", None)
    if owner is not None and not isinstance(owner, nn.Module):
        yield from getattr(owner, "__dict__", {}).items()
    elif owner is not None:
        yield "module", owner
    function = getattr(call, "__func__", call)
    code = getattr(function, "__code__", None)
    if code is None:
        yield from getattr(call, "__dict__", {}).items()
        return
    if hasattr(function, "__wrapped__"):
        yield "step", function.__wrapped__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield "default", function.__defaults__ or ()
    yield "default", function.__kwdefaults__ or {}
    for name in code.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, nn.Module | torch.optim.Optimizer | list | dict) or (
            callable(value) and getattr(value, "__module__", None) == function.__module__
        ):
            yield name, value


def load(name: str) -> Callable[[], Made]:
    """Return the callable of `module:callable`, wrapped to check its return value; see Note [Programs].

    Raises:
        WrongProgram: there is no such module or callable, or the module cannot be imported.
    """
    module_name, _, path = name.partition(":")
    made: Any = _import(module_name, name)
    for part in path.split("."):
        if not hasattr(made, part):
            near = difflib.get_close_matches(part, dir(made), n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise WrongProgram(f"{name!r}: {module_name} has no {part!r}{hint}")
        made = getattr(made, part)
    if isinstance(made, nn.Module):
        raise WrongProgram(f"{name!r} is a module that exists already; it must be a function that will {SHAPE}")
    if not callable(made):
        kind = type(made).__name__
        raise WrongProgram(f"{name!r} is of type {kind}, not callable; it must be a function that will {SHAPE}")
    if not _takes(made, 0):
        raise WrongProgram(f"{name!r} takes arguments; it must be a function without any that will {SHAPE}")
    return lambda: checked(name, made())


def _import(module_name: str, name: str) -> Any:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise WrongProgram(
                f"{name!r}: there is no module {error.name!r}; run from the folder that holds it, or set PYTHONPATH"
            ) from error
        raise WrongProgram(f"{name!r}: importing {module_name} failed: {error}") from error
    except Exception as error:
        raise WrongProgram(f"{name!r}: importing {module_name} failed: {type(error).__name__}: {error}") from error


def checked(name: str, made: Any) -> Made:
    """Return what a program's function has returned as a `Made`.

    Raises:
        WrongProgram: it is none of the forms of Note [Programs].
    """
    example_inputs: Any = getattr(made, "example_inputs", None)
    if isinstance(made, nn.Module) and callable(example_inputs):
        made = (made, example_inputs())
    match made:
        case (nn.Module() as module, list() | tuple() as args):
            return Made(module, [Inputs(tuple(args))])
        case (call, list() | tuple() as args, Mapping() as kwargs) if callable(call):
            return Made(call, [Inputs(tuple(args), dict(kwargs))])
        case (call, tuple() as args) if callable(call) and not _takes(call, 1) and _takes(call, len(args)):
            return Made(call, [Inputs(args)])
        case (step, batches) if callable(step) and not isinstance(step, nn.Module):
            return Made(step, _batches(name, batches), is_step=True)
        case list() | tuple():
            raise WrongProgram(
                f"{name!r} returned ({', '.join(type(each).__name__ for each in made)}); it must {SHAPE}"
            )
    given = made if isinstance(made, Mapping) else getattr(made, "__dict__", {})
    values = {key: given.get(key, getattr(made, key, None)) for key in NAMES}
    if isinstance(made, Mapping) and (unknown := [key for key in made if key not in (*NAMES, *OPTIONS)]):
        known = ", ".join((*NAMES, *OPTIONS))
        raise WrongProgram(f"{name!r} returned a dict with {unknown[0]!r}, which is no name of these: {known}")
    options = {key: given.get(key, getattr(made, key, None)) for key in OPTIONS}
    if isinstance(made, nn.Module) or (values["step"] is None) == (values["module"] is None):
        raise WrongProgram(f"{name!r} returned {type(made).__name__}; it must {SHAPE}")
    _check_options(name, options)
    if values["step"] is not None:
        if not callable(values["step"]) or options["loss"] is not None:
            raise WrongProgram(f"{name!r}: step must be a function of a batch, which computes its loss itself")
        return Made(values["step"], _batches(name, values["batches"]), is_step=True, **options)
    args = values["args"]
    if not callable(values["module"]) or not isinstance(args, list | tuple):
        raise WrongProgram(f"{name!r}: module must be callable, and args a tuple of its arguments")
    return Made(values["module"], [Inputs(tuple(args), dict(values["kwargs"] or {}))], **options)


def _takes(call: Callable[..., Any], count: int) -> bool:
    """Return whether a function's signature accepts so many positional arguments."""
    try:
        inspect.signature(call).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    if options["dtype"] is not None and options["dtype"] not in get_args(DtypePolicy):
        raise WrongProgram(
            f"{name!r}: dtype is {options['dtype']!r}; it must be one of {', '.join(get_args(DtypePolicy))}"
        )
    for key in ("loss", "inputs"):
        if options[key] is not None and not callable(options[key]):
            raise WrongProgram(f"{name!r}: {key} must be a function, and is a {type(options[key]).__name__}")
    tolerance = options["tolerance"]
    if tolerance is not None and not (isinstance(tolerance, float) and 0.0 < tolerance < 1.0):
        raise WrongProgram(
            f"{name!r}: tolerance is {tolerance!r}; it must be a relative error between 0 and 1, as 1e-3"
        )


def _batches(name: str, batches: Any) -> list[Inputs]:
    if isinstance(batches, torch.Tensor | str) or not isinstance(batches, Iterable):
        raise WrongProgram(
            f"{name!r}: batches is a {type(batches).__name__}; it must be a list of batches, or a loader"
        )
    found = list(itertools.islice(batches, MOST_BATCHES))
    if not found:
        raise WrongProgram(f"{name!r}: batches is empty; give at least one batch")
    forms = [[(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors_of(batch)] for batch in found]
    return [Inputs((batch,)) for batch, form in zip(found, forms, strict=True) if form == forms[0]]


def workload(name: str, make: Callable[[], Made] | None = None) -> Workload:
    """Return the program of this name as a workload. Its record is complete once it is built.

    Raises:
        WrongProgram: there is no such program.
    """
    make = make or load(name)
    return Workload(
        acronym=name,
        name=name,
        suite="yours",
        task="inference",
        batch=1,
        dtype_policy="fp32",
        build=lambda variant, size, device: build(name, make, device)[1],
        inputs=lambda variant, size, generator: make().sets[0],
        builds_on_device=True,
        own=functools.partial(build, name, make),
    )


def build(name: str, make: Callable[[], Made], device: torch.device) -> tuple[Workload, nn.Module]:
    """Call `make`, and move its return value to `device` if nothing of it is on a GPU.

    Returns:
        The complete record, and the user's module, or a `Called` around the user's function.
    """
    made = make()
    module = made.call if isinstance(made.call, nn.Module) else Called(made.call)
    given = [[each.args, dict(each.kwargs)] for each in made.sets]
    moves = not any(tensor.is_cuda for tensor in (*module.parameters(), *module.buffers(), *tensors_of(given)))
    if moves:
        module.to(device)
    trains = made.is_step or made.loss is not None
    record = replace(
        workload(name, make),
        task="training" if trains else "inference",
        batch=batch_of(made),
        dtype_policy=policy_of(made, module),
        loss=made.loss,
        is_step=made.is_step,
        tolerance=made.tolerance,
        inputs_at=lambda index: _to(inputs_of(made, index), device) if moves else inputs_of(made, index),
    )
    if made.is_step:  # optimizers make their state in the first step, and all modes begin after it
        module(*(_to(made.sets[0], device) if moves else made.sets[0]).args)
    return record, module


def inputs_of(made: Made, index: int) -> Inputs:
    """Return the arguments of call `index`: see Note [Inputs of one's own]."""
    if made.inputs is not None:
        given = made.inputs(index)
        has_kwargs = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)
        args, kwargs = given if has_kwargs and isinstance(given[0], list | tuple) else (given, {})
        return Inputs((args,) if made.is_step else tuple(args), dict(kwargs))
    given = made.sets[index % len(made.sets)]
    turn = index // len(made.sets)
    return given if turn == 0 else _changed(given, lambda tensor: _rolled(tensor, turn))


def _rolled(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    with torch.no_grad():
        new = torch.empty_like(tensor).copy_(tensor)
        if tensor.dim() and len(tensor) > 1:
            new.copy_(tensor.roll(turn, 0))
        elif tensor.is_floating_point() or tensor.is_complex():
            new.mul_(1.0 - turn / 16)
    return new.requires_grad_(tensor.requires_grad)


def _to(inputs: Inputs, device: torch.device) -> Inputs:
    return _changed(inputs, lambda tensor: tensor.to(device))


def _changed(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    args, kwargs = map_tensors((inputs.args, dict(inputs.kwargs)), change)
    return Inputs(args=args, kwargs=kwargs)


def batch_of(made: Made) -> int:
    """Return the size of the first dimension of the first tensor that is passed, 1 where there is none."""
    tensors = tensors_of([made.sets[0].args, dict(made.sets[0].kwargs)])
    first = next((tensor for tensor in tensors if tensor.dim()), None)
    return 1 if first is None else len(first)


def policy_of(made: Made, module: nn.Module) -> DtypePolicy:
    """Return the requested dtype policy, or the one of the shortest floating type of weights and inputs."""
    if made.dtype is not None:
        return made.dtype
    tensors = [*module.parameters(), *tensors_of([made.sets[0].args, dict(made.sets[0].kwargs)])]
    dtypes = {tensor.dtype for tensor in tensors}
    if torch.bfloat16 in dtypes:
        return "bf16"
    return "fp16" if torch.float16 in dtypes else "fp32"
