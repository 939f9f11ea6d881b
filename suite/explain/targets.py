"""What `encore explain` can be asked about: a workload by name, or a program of the user's as `module:callable`.

Note [Programs]. `module` is imported as `python -m` imports it, the working directory being the first place to look for
it, also where it is called `models` or `suite`. `callable` takes no argument and returns one of

* `(module, args)` or `(module, args, kwargs)`: an `nn.Module`, a tuple or list of positional arguments, and a mapping
  of keyword arguments;
* an `nn.Module` with a method `example_inputs()` that returns the positional arguments (an `nn.Module` class whose
  constructor needs no argument is such a callable).

It runs under fake tensors, so it may be as large as it likes, and must not read values of tensors it draws at random as
weights. If it puts anything on "cuda", everything is left where it put it; if not, module and arguments are moved to
the GPU. `torch.cuda.is_available()` is False while it runs.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models import registry
from models.registry import Size, UnknownWorkload, Workload
from suite.checkout import git_state
from suite.errors import WrongUse
from suite.explain.records import Explanation
from suite.matrix import require_whole, select_workloads
from suite.schema import EXPLANATION_VERSION
from suite.store import REPOSITORY

if TYPE_CHECKING:
    from torch import nn

_SHAPE = "return (module, args), (module, args, kwargs), or an nn.Module that has example_inputs()"


@dataclass(frozen=True, slots=True)
class Target:
    """One thing to explain. `variant` is None for a program of the user's."""

    name: str
    variant: str | None
    size: Size = "full"

    @property
    def is_program(self) -> bool:
        return is_program(self.name)

    @property
    def label(self) -> str:
        return self.name if self.variant is None else f"{self.name} ({self.variant})"


def is_program(name: str) -> bool:
    """Whether a name means a program of the user's: `module:callable`, but not `torchbench:NAME`."""
    return ":" in name and not registry.is_sourced(name)


def find_targets(
    names: Sequence[str], *, variant: str | None = None, size: Size = "full", workload_set: str | None = None
) -> list[Target]:
    """Targets of these names; of no name, every workload (of the set) in each of its variants, or in `variant` alone.

    Raises:
        WrongUse: a workload, set or variant is unknown, or a `module:callable` is none; the message says what is known.
    """
    if not names:
        return [
            Target(workload.acronym, each, size)
            for workload, default in select_workloads((), variant, workload_set)
            for each in (workload.variants if variant is None else (default,))
        ]
    targets: dict[Target, None] = {}
    for name in names:
        if is_program(name):
            _check_program_name(name, variant, size)
            targets[Target(name, None, size)] = None
        else:
            (workload, chosen), *_ = _workload(name, variant)
            require_whole(workload)
            targets[Target(workload.acronym, chosen, size)] = None
    return list(targets)


def _workload(name: str, variant: str | None) -> list[tuple[Workload, str]]:
    try:
        return select_workloads([name], variant)
    except WrongUse as error:
        unknown = isinstance(error.__cause__, UnknownWorkload) and not registry.is_sourced(name)
        if not unknown or not all(part.isidentifier() for part in name.removesuffix(".py").split(".")):
            raise
        example = f"{name.removesuffix('.py')}:make"
        raise WrongUse(f"{error}; a program of your own is named with its function: {example}") from error


def _check_program_name(name: str, variant: str | None, size: Size) -> None:
    module, _, attribute = name.partition(":")
    if variant is not None:
        raise WrongUse(f"--variant {variant!r} is for workloads; {name!r} is a program, and has none")
    if size != "full":
        raise WrongUse(f"--size {size} is for workloads; {name!r} is a program, and has the size it is written with")
    parts = (*module.split("."), *attribute.split("."))
    if not all(part.isidentifier() for part in parts):
        raise WrongUse(f"{name!r} is not a module:callable; write it as Python does, for example package.module:make")


def unexplained(target: Target, error: str | None) -> Explanation:
    """The explanation of `target` before anything is known of it."""
    workload = None if target.is_program else registry.planned(target.name)
    commit, dirty = git_state(REPOSITORY)
    return Explanation(
        schema_version=EXPLANATION_VERSION,
        target=target.name,
        variant=target.variant,
        size=target.size,
        task="inference" if workload is None else workload.task,
        batch=None if workload is None else workload.batch,
        torch=version("torch"),
        commit=commit,
        dirty=dirty,
        graphs=[],
        breaks=[],
        limits=[],
        error=error,
    )


def load_program(name: str) -> Callable[[], tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]]:
    """The callable behind `module:callable`, wrapped so that what it returns is checked; see Note [Programs].

    Raises:
        WrongUse: there is no such module or callable, or the module cannot be imported.
    """
    module_name, _, path = name.partition(":")
    made: Any = _import(module_name, name)
    for part in path.split("."):
        if not hasattr(made, part):
            near = difflib.get_close_matches(part, dir(made), n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise WrongUse(f"{name!r}: {module_name} has no {part!r}{hint}")
        made = getattr(made, part)
    if not callable(made):
        raise WrongUse(f"{name!r} is a {type(made).__name__}, not callable; it must be a function that will {_SHAPE}")
    return lambda: _checked(name, made)


def _import(module_name: str, name: str) -> Any:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise WrongUse(
                f"{name!r}: there is no module {error.name!r}; run from the folder that holds it, or set PYTHONPATH"
            ) from error
        raise WrongUse(f"{name!r}: importing {module_name} failed: {error}") from error
    except Exception as error:
        raise WrongUse(f"{name!r}: importing {module_name} failed: {type(error).__name__}: {error}") from error


def _checked(name: str, make: Callable[[], Any]) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    from torch import nn

    if isinstance(make, nn.Module):
        raise WrongUse(f"{name!r} is a module that exists already; it must be a function that will {_SHAPE}")
    made = make()
    example_inputs: Any = getattr(made, "example_inputs", None)
    if isinstance(made, nn.Module) and callable(example_inputs):
        made = (made, example_inputs())
    match made:
        case (nn.Module() as module, (tuple() | list()) as args):
            return module, tuple(args), {}
        case (nn.Module() as module, (tuple() | list()) as args, Mapping() as kwargs):
            return module, tuple(args), dict(kwargs)
    shown = f"({', '.join(type(part).__name__ for part in made)})" if isinstance(made, tuple) else type(made).__name__
    raise WrongUse(f"{name!r} returned {shown}; it must {_SHAPE}")
