#!/usr/bin/env python3
"""Programs as people write them, eager, under stock CUDA graphs and under Encore: results, times, memory, recordings.

    python tests/gpu/programs.py --out programs.jsonl              on a GPU, all of them
    python tests/gpu/programs.py --device cpu --tiny --only NAME   the script itself, anywhere (eager and aot_eager)
    python tests/gpu/programs.py --table programs.jsonl            the table of rows that were written before
    python tests/gpu/programs.py --table a.jsonl b.jsonl           speeds over stock in several runs, with their medians

Rows (JSON lines, one per program and mode) are written when their program is through; the table follows at the end.
Exit codes: 0 fine; 1 a result other than eager's, no result where eager has one, a program that was not run; 2 wrong
use; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import difflib
import json
import os
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parent
sys.path[:0] = [str(SOURCES), str(SOURCES.parents[1])]

from real_programs import rows as rows_of  # noqa: E402
from real_programs.record import COMPILE, Program, programs  # noqa: E402

INTERRUPTED = 130
MODES = {"cuda": ("eager", "stock", "encore"), "cpu": ("eager", "aot_eager")}


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:  # a full disk: the rows before are written
        print(f"programs.py: {error.strerror or error}: {error.filename or 'the rows'}", file=sys.stderr)
        return 1


def _main(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.list:
        for program in programs().values():
            print(f"{program.name} ({program.family}): {program.summary}")
        return 0
    if given.table:
        try:
            runs = [rows_of.read(file) for file in given.table]
        except (OSError, ValueError) as error:
            parser.error(str(error))
        if len(runs) > 1:
            print(rows_of.pooled(runs))
            return 0
        return _verdict(runs[0])
    chosen = _chosen(given.only, parser)
    modes = tuple(dict.fromkeys(given.modes.split(","))) if given.modes else MODES[given.device]
    for mode in modes:
        if mode not in COMPILE:
            parser.error(f"unknown mode {mode!r}; there are {', '.join(COMPILE)}")
        if given.device == "cpu" and mode in ("stock", "encore"):
            parser.error(f"mode {mode} needs --device cuda")
    if given.out and not given.out.parent.is_dir():
        parser.error(f"--out {given.out}: there is no folder {given.out.parent}")
    if given.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("PyTorch finds no NVIDIA GPU here; `--device cpu --tiny` runs the script without one")
    return _run(given, chosen, modes)


def _run(given: argparse.Namespace, chosen: list[Program], modes: tuple[str, ...]) -> int:
    from real_programs.conduct import Conductor, Plan

    cores = len(os.sched_getaffinity(0))
    plan = Plan(
        modes=modes,
        device=given.device,
        tiny=given.tiny,
        jobs=given.jobs or max(1, cores - 2),
        alive=given.alive,
        timeout_s=given.timeout,
        budget_s=given.budget,
        turn_s=given.turn or (0.05 if given.tiny else 0.12),
        settle_s=given.settle,
    )
    rows: list[dict[str, Any]] = []
    common = _common()
    with given.out.open("a", encoding="utf-8") if given.out else contextlib.nullcontext() as out:

        def tell(row: dict[str, Any]) -> None:
            rows.append(row)
            if out is None:
                return
            # An infinite error is a string, for JSON has no such number; `float` reads it back.
            valid = {name: "Infinity" if value == float("inf") else value for name, value in row.items()}
            out.write(json.dumps(valid, allow_nan=False) + "\n")
            out.flush()
            os.fsync(out.fileno())

        conductor = Conductor(plan, common, tell, lambda text: print(text, file=sys.stderr, flush=True))
        try:
            asyncio.run(_until_signal(conductor, chosen))
        except (KeyboardInterrupt, asyncio.CancelledError):
            print(f"interrupted; {len(rows)} rows were written", file=sys.stderr)
            return INTERRUPTED
    return _verdict(rows)


async def _until_signal(conductor: Any, chosen: list[Program]) -> None:
    """SIGTERM ends the run as Ctrl-C does: workers are ended first."""
    task = asyncio.current_task()
    assert task
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await conductor.run(chosen)


def _verdict(rows: Sequence[rows_of.Row]) -> int:
    print(rows_of.table(rows))
    found = rows_of.findings(rows)
    for finding in found:
        print(f"FINDING: {finding}")
    return 1 if found else 0


def _common() -> dict[str, Any]:
    """What every row says of where it was made."""
    from importlib.metadata import version

    from suite.checkout import git_state
    from suite.gpu import NoGpu, find_gpu
    from suite.store import REPOSITORY

    try:
        driver = find_gpu().driver
    except NoGpu:
        driver = None
    commit, dirty = git_state(REPOSITORY)
    return {
        "commit": commit,
        "code_changed": dirty,
        "torch": version("torch"),
        "driver": driver,
        "python": platform.python_version(),
    }


def _chosen(names: str | None, parser: argparse.ArgumentParser) -> list[Program]:
    every = programs()
    if names is None:
        return list(every.values())
    chosen = []
    for name in names.split(","):
        family = [program for program in every.values() if program.family == name]
        if not family and name not in every:
            near = difflib.get_close_matches(name, every, n=3) or list(every)
            parser.error(f"unknown program or family {name!r}; did you mean {', '.join(near)}? (--list shows all)")
        chosen += family or [every[name]]
    return list(dict.fromkeys(chosen))


def _parser() -> argparse.ArgumentParser:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", help="programs or families, separated by commas; default: all")
    parser.add_argument("--modes", metavar="MODES", help=f"of {', '.join(COMPILE)}; default: what the device can run")
    parser.add_argument("--device", choices=MODES, default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for testing the script")
    parser.add_argument("--budget", type=_seconds, default=360.0, metavar="SECONDS", help="time for all (360)")
    parser.add_argument("--timeout", type=_seconds, default=120.0, metavar="SECONDS", help="for one answer (120)")
    parser.add_argument(
        "--settle", type=_seconds, default=4.8, metavar="SECONDS", help="for Encore to have nothing pending (4.8)"
    )
    parser.add_argument(
        "--turn", type=_seconds, metavar="SECONDS", help="for a mode's turn, of which it has nine (0.12)"
    )
    parser.add_argument("--jobs", type=_count, metavar="N", help="processes at a time; default: cores less two")
    parser.add_argument("--alive", type=_count, default=14, metavar="N", help="programs that are timed together (14)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the rows to this file")
    parser.add_argument("--list", action="store_true", help="name the programs and end")
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="draw the table of these rows and end; of several files, how fast each program was in each",
    )
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return value


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the script as Ctrl-C does
    sys.exit(main())
