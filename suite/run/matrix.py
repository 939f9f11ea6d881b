"""Select the cells a command is about: from names on the command line to workloads, their variants, and modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from typing import TypeVar

from models import registry
from models.registry import UnknownWorkload, Workload
from suite.measure.modes import MODES, Mode, select_modes
from suite.results.errors import WrongUse

_T = TypeVar("_T")


def select_workloads(
    names: Sequence[str], variant: str | None, workload_set: str | None = None, *, planned: bool = False
) -> list[tuple[Workload, str]]:
    """Return workloads of these names, or of a set, with the variant each is built as; neither: all registered ones.

    `planned` names are those that a run is to hold already: what cannot be imported any more, or never could, is for
    its cells to tell. `variant` may be several, separated by commas: a workload is built as each that it has.
    Workloads that have none of them are left out where all are meant, and an error where named.

    Raises:
        WrongUse: a name, a set or a variant is unknown, and the message names the nearest ones; or names and a set
            are given both.
    """
    if names and workload_set is not None:
        raise WrongUse(f"--set {workload_set} chooses the workloads itself; leave it or {', '.join(names)} out")
    if sets := [name for name in names if registry.is_set(name)]:
        raise WrongUse(f"{sets[0]!r} is a set of workloads; choose it by --set {sets[0]}")
    find = registry.planned if planned else registry.find
    chosen = registry.ALL if workload_set is None else workload_set
    wanted = [_looked_up(find, name) for name in names] or _looked_up(registry.find_set, chosen)
    unique = {workload.acronym: workload for workload in wanted}
    if variant is None:
        return [(workload, workload.variants[0]) for workload in unique.values()]
    wished = variant.split(",")
    having = [(workload, one) for workload in unique.values() for one in wished if one in workload.variants]
    lacking = [workload for workload in unique.values() if not set(wished).intersection(workload.variants)]
    nowhere = [one for one in wished if one not in {found for _, found in having}]
    if nowhere or (names and lacking):
        shown = lacking or list(unique.values())
        known = "; ".join(f"{workload.acronym} has {', '.join(workload.variants)}" for workload in shown[:5])
        unknown = ",".join(nowhere) or variant
        raise WrongUse(f"unknown variant {unknown!r}: {known} (`encore list` shows all)")
    return having


def _looked_up(find: Callable[[str], _T], name: str) -> _T:
    try:
        return find(name)
    except UnknownWorkload as error:
        if registry.is_sourced(name) or registry.is_set(name):
            raise WrongUse(str(error)) from error
        module = name.removesuffix(".py")
        may_be_own = all(part.isidentifier() for part in module.split("."))
        own = f"; a program of your own is named with its function: {module}:make" if may_be_own else ""
        raise WrongUse(f"{error} (`encore list` shows all){own}") from error


def split_names(names: Sequence[str], degrees: Sequence[int], workload_set: str | None) -> list[str]:
    """Return names of workloads, each split over each number of GPUs: "XLNET-I@tp2". No names: all that can be split.

    Raises:
        WrongUse: a workload is unknown or cannot be split, is named with a number of GPUs already, or a set is given.
    """
    if workload_set is not None:
        raise WrongUse("--tp takes names of workloads, or none for all that can be split over GPUs; leave --set out")
    if marked := [name for name in names if registry.TP_MARK in name.lower()]:
        raise WrongUse(f"{marked[0]} says itself over how many GPUs it is split; leave that or --tp out")
    try:
        chosen = [registry.find(name) for name in names]
        chosen = chosen or [row for row in registry.workloads().values() if row.sharding is not None]
        return [registry.sharded(row, degree).acronym for row in chosen for degree in degrees]
    except UnknownWorkload as error:
        raise WrongUse(f"{error} (`encore list` shows all)") from error


def require_whole(workload: Workload) -> None:
    """Refuse a split workload, for commands that analyse a program in one process.

    Raises:
        WrongUse: the row is split over several GPUs.
    """
    if (workload.tp or 1) > 1:
        whole = workload.acronym.rpartition(registry.TP_MARK)[0]
        raise WrongUse(
            f"{workload.acronym} is split over {workload.tp} GPUs, and only `encore run` runs that; name {whole}, or "
            f"{whole}{registry.TP_MARK}1 for its batch"
        )


def matching(chosen: Sequence[tuple[Workload, str]], pattern: str | None) -> list[tuple[Workload, str]]:
    """Return those whose acronym or name matches a pattern with `*`, `?` and `[]`, in any case; without one all.

    Raises:
        WrongUse: none does; the message names what there was.
    """
    if pattern is None:
        return list(chosen)
    of = [
        (workload, variant)
        for workload, variant in chosen
        if any(fnmatch(name.lower(), pattern.lower()) for name in (workload.acronym, workload.name))
    ]
    if not of:
        names = ", ".join(workload.acronym for workload, _ in chosen)
        raise WrongUse(f"--filter {pattern!r} matches no workload of {names}; patterns are written as 'XLNET*'")
    return of


def require_program_name(name: str, variant: str | None, size: str) -> None:
    """Refuse what is not written as `module:callable`, and options of workloads for it.

    Raises:
        WrongUse: see above.
    """
    if variant is not None or size != "full":
        raise WrongUse(f"{name} is a program of your own: --tp, --variant and --size are for workloads; leave them out")
    module, _, path = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *path.split("."))):
        raise WrongUse(f"{name!r} is not a module:callable; write it as Python does, for example package.module:make")


def parse_degrees(text: str) -> tuple[int, ...]:
    """Return numbers of GPUs from a text such as "1,2,4".

    Raises:
        WrongUse: one is not a whole number from 1 to `MOST_GPUS`, or there is none.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        raise WrongUse(f"--tp {text!r} is not a list of numbers of GPUs: write 1,2,4")
    degrees = tuple(dict.fromkeys(int(part) for part in parts))
    if not all(1 <= degree <= registry.MOST_GPUS for degree in degrees):
        raise WrongUse(f"--tp {text!r} is out of range: a number of GPUs is from 1 to {registry.MOST_GPUS}")
    return degrees


def select_modes_for(device: str, names: Sequence[str] | None) -> tuple[Mode, ...]:
    """Return modes of these names, or the usual ones that this device has a use for, in their order of declaration.

    Raises:
        WrongUse: a name is unknown, or a mode with CUDA graphs is requested on a CPU.
    """
    if names is None:
        usual = [mode for mode in MODES.values() if not mode.captures_more]
        return tuple(mode for mode in usual if device == "cuda" or not mode.needs_gpu)
    modes = select_modes(names)
    if not modes:
        raise WrongUse(f"--modes names no mode; known: {', '.join(MODES)}")
    graphs = [mode.name for mode in modes if mode.needs_gpu]
    if device == "cpu" and graphs:
        raise WrongUse(f"modes {', '.join(graphs)} use CUDA graphs and need --device cuda")
    return modes
