#!/usr/bin/env python3
"""Programs as people write them, eager, under plain compile, stock CUDA graphs and Encore: results, times, memory.

    python tests/gpu/programs.py --out programs.jsonl              on a GPU, all of them
    python tests/gpu/programs.py --out FILE --processes 3          the speed floor: each program in three processes
    python tests/gpu/programs.py --device cpu --tiny --only NAME   the script itself, anywhere (eager and aot_eager)
    python tests/gpu/programs.py --table programs.jsonl            the table of rows that were written before
    python tests/gpu/programs.py --table a.jsonl b.jsonl           speeds in the processes of several runs

Rows (JSON lines, one per program and mode) are written when their program is through; the table follows at the end.
With `--processes`, programs that have their rows in FILE are not run again, so that a run that ended early can go on. A
program is SLOW if the whole interval of its speed over plain compile's, over three processes or more, is below 0.95.

Exit codes: 0 fine; 1 a result other than eager's, no result where eager has one, a program that was not run, a SLOW
one; 2 wrong use; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parent
sys.path[:0] = [str(SOURCES), str(SOURCES.parents[1])]

from real_programs import floor  # noqa: E402
from real_programs import rows as rows_of  # noqa: E402
from real_programs.record import COMPILE, Program, programs  # noqa: E402

from tests.support.row_files import facts  # noqa: E402

INTERRUPTED = 130
MODES = {"cuda": ("eager", "compile", "stock", "encore"), "cpu": ("eager", "aot_eager")}


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
        return _verdict(runs)
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

    begun = time.monotonic()
    cores = len(os.sched_getaffinity(0))
    plan = Plan(
        modes=modes,
        device=given.device,
        tiny=given.tiny,
        jobs=given.jobs or max(1, cores - 2),
        alive=given.alive,
        timeout_s=given.timeout,
        budget_s=given.seconds,
        turn_s=given.turn or (0.05 if given.tiny else 0.12),
        settle_s=given.settle,
    )
    rows = _written(given)
    common = _common()
    with (
        given.out.open("a", encoding="utf-8") if given.out else contextlib.nullcontext() as out,
        tempfile.TemporaryDirectory(prefix="encore-programs-") as cache,
    ):

        def tell(row: dict[str, Any]) -> None:
            rows.append(row)
            if out is None:
                return
            # An infinite error is a string, for JSON has no such number; `float` reads it back.
            valid = {name: "Infinity" if value == float("inf") else value for name, value in row.items()}
            out.write(json.dumps(valid, allow_nan=False) + "\n")
            out.flush()
            os.fsync(out.fileno())

        try:
            for process in range(1, given.processes + 1):
                left = given.seconds - (time.monotonic() - begun)
                programs = _not_run(chosen, rows, modes, process)
                if left > 0 and programs:
                    its = dataclasses.replace(plan, budget_s=left)
                    Conductor(its, {**common, "process": process}, tell, _say, Path(cache)).run(programs)
        except KeyboardInterrupt:
            print(f"interrupted; {len(rows)} rows were written", file=sys.stderr)
            return INTERRUPTED
    remain = sum(len(_not_run(chosen, rows, modes, process)) for process in range(1, given.processes + 1))
    if given.processes > 1 and remain:
        print(f"{remain} runs of programs remain; start again with the same --out to go on", file=sys.stderr)
    return max(_verdict([rows]), int(remain > 0))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _written(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of an earlier run that `--processes` continues."""
    goes_on = given.processes > 1 and given.out and given.out.exists()
    return rows_of.read(given.out) if goes_on else []


def _not_run(
    chosen: Sequence[Program], rows: Sequence[rows_of.Row], modes: Sequence[str], process: int
) -> list[Program]:
    """Return the programs that lack a row of this process in one of the modes."""
    done = {
        (row["program"], row["mode"]) for row in rows if row.get("process", 1) == process and row["status"] != "not_run"
    }
    return [program for program in chosen if not all((program.name, mode) in done for mode in modes)]


def _verdict(runs: Sequence[Sequence[rows_of.Row]]) -> int:
    """Print what the rows say, the table of the last process first. Return the exit code."""
    processes = floor.by_process(runs)
    if len(runs) == 1 and processes:
        print(rows_of.table(processes[-1]))
    speeds = [one for one in floor.speeds(processes) if one.mode == "encore"]
    if speeds:
        print(*floor.brief(processes), sep="\n")
    found = dict.fromkeys(f"FINDING: {one}" for rows in processes for one in rows_of.findings(rows))
    for line in found:
        print(line)
    return int(bool(found or floor.slow(speeds)))


def _common() -> dict[str, Any]:
    """Return what every row says of where it was made. PyTorch would take memory of the GPU to say its name."""
    from suite.measure.gpu import NoGpu, find_gpu

    try:
        gpu = find_gpu()
    except NoGpu:
        return {**facts("cpu"), "driver": None}
    return {**facts(gpu.info.name), "driver": gpu.driver}


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
    parser.add_argument("--seconds", type=_seconds, default=360.0, metavar="LIMIT", help="time for all (360)")
    parser.add_argument("--processes", type=_count, default=1, metavar="N", help="run each program so often (1)")
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
