"""The command `encore decisions`: verdicts of the backend's selection that are stored on this machine."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suite.cli_choices import JsonOption
from suite.console import console
from suite.errors import WrongUse

if TYPE_CHECKING:
    from optimizations.selection.identity import Here
    from optimizations.selection.store import Found, VerdictStore
    from optimizations.selection.verdict import StoredVerdict

app = typer.Typer(epilog="Example: encore decisions explain 3f9a")

SHORT = 12
"""Characters of a verdict's name that lists show; `explain` and `clear` take any beginning that is unambiguous."""

Folder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where verdicts lie; default: where the backend keeps them.", show_default=False),
]

_MEANING = {
    "none": "the generated function runs without a CUDA graph",
    "copy": "a CUDA graph is replayed, its inputs copied",
    "indirection": "a CUDA graph is replayed that reads its inputs in place",
}

_ENDED = {
    "certainty": "it was sure",
    "calls": "it had as many calls as it may",
    "time": "it had taken as long as it may",
    "cost": "it had cost as much as it may",
}


@app.callback(invoke_without_command=True)
def decisions(context: typer.Context, folder: Folder = None, as_json: JsonOption = False) -> None:
    """List, explain or clear what selection found out about graphs, as it is stored on this machine."""
    if context.invoked_subcommand is None:
        list_decisions(folder, as_json=as_json)
    elif as_json or folder is not None:
        option, whole = ("--json", "--json") if folder is None else ("--folder", f"--folder {folder}")
        raise WrongUse(f"{option} goes behind the command: encore decisions {context.invoked_subcommand} {whole}")


@app.command("list", epilog="Example: encore decisions list --json")
def list_decisions(folder: Folder = None, as_json: JsonOption = False) -> None:
    """List verdicts, the oldest first, and files that are ignored."""
    store = _store(folder)
    found = store.list()
    strays = store.strays()
    place = _here(found)
    if as_json:
        print(json.dumps([_as_json(one, place) for one in (*found, *strays)], indent=2))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "verdict", "kept", "outcome", "others take", "direction", "calls", "objective", "GPU", "holds here", box=None
    )
    for one in found:
        if one.verdict is not None and place is not None:
            row = *_row(one.key, one.verdict), _holds(one.verdict, place)
            table.add_row(*(Text(_printable(cell)) for cell in row))
    if table.row_count:
        console().print(table)
    for one in (*found, *strays):
        if one.ignored is not None:
            console().print(_printable(f"{one.path.name} is ignored: {one.ignored}"))
    if not found:
        print(f"no verdicts in {store.directory}; programs that run with backend='encore' make some")


@app.command(epilog="Example: encore decisions explain 3f9a")
def explain(
    verdict: Annotated[str, typer.Argument(metavar="VERDICT", help="How its name begins.")],
    folder: Folder = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what one verdict says, and what it holds for."""
    found = _one(_store(folder), verdict)
    place = _here([found])
    if as_json:
        print(json.dumps(_as_json(found, place), indent=2))
    elif found.verdict is None or place is None:
        print(_printable(str(found.path)), _printable(f"is ignored: {found.ignored}"), sep="\n")
    else:
        lines = _lines(found.key, found.verdict)
        print("\n".join(map(_printable, (*lines, f"  holds here: {_holds(found.verdict, place)}"))))


@app.command(epilog="Example: encore decisions clear --stale")
def clear(
    verdicts: Annotated[
        list[str] | None, typer.Argument(metavar="VERDICT", help="How names begin.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them, ignored files too.")] = False,
    stale: Annotated[
        bool, typer.Option("--stale", help="Those of other versions than there are here, and ignored files.")
    ] = False,
    folder: Folder = None,
) -> None:
    """Remove verdicts; graphs are measured again by the next process."""
    given = [
        *(["--all"] if everything else []),
        *(["--stale"] if stale else []),
        *([f"names ({', '.join(verdicts)})"] if verdicts else []),
    ]
    if len(given) > 1:
        raise WrongUse(
            f"give one of {' and '.join(given)}, not {'both' if len(given) == 2 else 'all'}; nothing was removed"
        )
    if not given:
        raise WrongUse("name verdicts as `encore decisions list` shows them, or give --all or --stale")
    store = _store(folder)
    keys = None if everything else _stale(store) if stale else [_one(store, name).key for name in verdicts or ()]
    removed = store.clear(keys)
    print(f"{removed} removed")


def _printable(text: str) -> str:
    """Without what a terminal would obey: files and names may be anybody's."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape", "surrogatepass").decode() for one in text)


def _store(folder: Path | None) -> VerdictStore:
    from optimizations.selection.store import VerdictStore, default_directory

    store = VerdictStore(folder or default_directory())
    try:
        is_folder = stat.S_ISDIR(store.directory.stat().st_mode)
        if is_folder and not os.access(store.directory, os.R_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except FileNotFoundError:
        if folder is None:  # the backend's folder may not be there yet; what is not one never will be
            return store
        is_folder = False
    except NotADirectoryError:  # something above it
        is_folder = False
    except OSError as error:  # its name is too long, it may not be looked into
        raise WrongUse(
            f"{'--folder ' if folder else ''}{store.directory}: {error.strerror}; name another: --folder DIR"
        ) from error
    if not is_folder and folder is not None:
        raise WrongUse(f"--folder {folder} is not a folder")
    if not is_folder:
        raise WrongUse(f"{store.directory} is not a folder; move that file away, or name another: --folder DIR")
    return store


def _one(store: VerdictStore, beginning: str) -> Found:
    """The one verdict whose name is this, or begins like this: a copy of its file may go on behind the whole name."""
    found = store.list()
    matching = [one for one in found if one.key == beginning] or [one for one in found if one.key.startswith(beginning)]
    if not beginning or not matching:
        raise WrongUse(f"no verdict begins with {beginning!r}; `encore decisions list` shows them")
    if len(matching) > 1:
        names = _printable(", ".join(one.key[:SHORT] for one in matching[:4]))
        raise WrongUse(f"{len(matching)} verdicts begin with {beginning!r}: {names}; give more of the name")
    return matching[0]


def _here(found: Sequence[Found]) -> Here | None:
    """What this machine is, if there is a verdict to compare it with: PyTorch takes seconds to import."""
    if all(one.verdict is None for one in found):
        return None
    from optimizations.selection.identity import here

    return here()


def _holds(verdict: StoredVerdict, place: Here) -> str:
    """Whether programs on this machine go by it."""
    differ = place.differences(verdict.circumstances)
    if differ:
        return f"no: {', '.join(differ)}"
    return "yes" if place.gpus else "not known without a GPU"


def _stale(store: VerdictStore) -> list[str]:
    found = store.list()
    place = _here(found)
    return [
        one.key
        for one in found
        if one.verdict is None or (place is not None and place.of_other_versions(one.verdict.circumstances))
    ]


def _as_json(found: Found, place: Here | None) -> dict[str, Any]:
    """`holds_here` is null where that is not known, as without a GPU."""
    verdict = holds_here = None
    differ: tuple[str, ...] = ()
    if found.verdict is not None and place is not None:
        verdict = found.verdict.model_dump(mode="json")
        differ = place.differences(found.verdict.circumstances)
        holds_here = False if differ else True if place.gpus else None
    return {
        "key": found.key,
        "ignored": found.ignored,
        "holds_here": holds_here,
        "differs_here": differ,
        "verdict": verdict,
    }


def _row(key: str, verdict: StoredVerdict) -> list[str]:
    others = ", ".join(f"{one.candidate} {one.ratio:.3f}x" for one in verdict.compared)
    return [
        key[:SHORT],
        verdict.kept,
        verdict.outcome,
        others,
        verdict.direction if len(verdict.group) == 1 else f"{verdict.direction}, with {len(verdict.group) - 1} more",
        str(verdict.calls),
        verdict.circumstances.objective,
        verdict.circumstances.gpu.partition(",")[0],
    ]


def _lines(key: str, verdict: StoredVerdict) -> list[str]:
    what = verdict.circumstances
    outcome = {
        "faster": "a simpler way was slower beyond the noise",
        "same": "no other way was faster beyond the noise, and this is the simplest",
        "unresolved": "measuring ended before it was sure; the best guess is kept",
    }[verdict.outcome]
    lines = [
        f"verdict {key}",
        f"  {verdict.direction} graph {what.graph[:SHORT]}"
        + (f", judged together with {len(verdict.group) - 1} more" if len(verdict.group) > 1 else ""),
        f"  kept: {verdict.kept} ({_MEANING.get(verdict.kept, verdict.kept)})",
        f"  {verdict.outcome}: {outcome}",
    ]
    for candidate in verdict.candidates:
        time = verdict.median_s.get(candidate)
        text = "not measured" if time is None else f"{time * 1e6:,.1f} us"
        lines.append(f"  {candidate:<12} {text}{_ratio(verdict, candidate)}")
    moved = "moved" if what.moving else "did not move"
    lines += [
        f"  measured on {verdict.calls} calls in {verdict.measuring_s:.2f} s, {verdict.excess_s:.2f} s of them more "
        "than the fastest way would have taken",
        f"  decided on {verdict.rounds} rounds; measuring ended because {_ENDED[verdict.ended_by]}",
        f"  inputs {moved} from call to call; {what.objective}; {verdict.measured_at}",
        f"  holds for: {what.gpu}; driver {what.driver}; {what.host}; torch {what.torch}; Encore {what.encore}; "
        f"{what.options}",
    ]
    return lines


def _ratio(verdict: StoredVerdict, candidate: str) -> str:
    one = next((one for one in verdict.compared if one.candidate == candidate), None)
    if one is None:
        return ""
    low, high = (f"{bound:.3f}" if bound is not None else "?" for bound in (one.low, one.high))
    return f", {one.ratio:.3f} times the kept one's time ({low} to {high}, {one.rounds} rounds)"
