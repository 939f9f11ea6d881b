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
import difflib
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
from real_programs.record import Program, programs  # noqa: E402

from tests.support.row_files import RowFile, facts, read_rows  # noqa: E402

INTERRUPTED = 130
MODES = {"cuda": ("eager", "compile", "stock", "encore"), "cpu": ("eager", "aot_eager")}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        if given.table:
            return _verdict([read_rows(path, rows_of.is_row) for path in given.table])
        file = RowFile(given.out, rows_of.is_row)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    chosen = _checked(given, parser)
    try:
        return _run(given, chosen, file)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:  # a full disk: the rows before are written
        print(f"programs.py: {error.strerror or error}: {error.filename or 'the rows'}", file=sys.stderr)
        return 1


def _checked(given: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Program]:
    """Fill in what was not given, and return the programs that are to run. Wrong use ends the script."""
    given.modes = MODES[given.device]
    if given.out and not given.out.parent.is_dir():
        parser.error(f"--out {given.out}: there is no folder {given.out.parent}")
    given.jobs = given.jobs or max(1, len(os.sched_getaffinity(0)) - 2)
    every, chosen = programs(), list[Program]()
    for name in given.only.split(",") if given.only else every:
        family = [program for program in every.values() if program.family == name]
        if not family and name not in every:
            near = difflib.get_close_matches(name, every, n=3) or list(every)
            parser.error(f"unknown program or family {name!r}; did you mean {', '.join(near)}?")
        chosen += family or [every[name]]
    if given.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("PyTorch finds no NVIDIA GPU here; `--device cpu --tiny` runs the script without one")
    return list(dict.fromkeys(chosen))


def _run(given: argparse.Namespace, chosen: Sequence[Program], file: RowFile) -> int:
    from real_programs.conduct import Conductor

    deadline = time.monotonic() + given.seconds
    rows = file.rows if given.processes > 1 else list[dict[str, Any]]()

    def tell(row: dict[str, Any]) -> None:
        file.add(row)
        if rows is not file.rows:
            rows.append(row)

    def remain(process: int) -> list[Program]:
        """Return the programs that lack a row of this process in one of the modes."""
        done = {
            (row["program"], row["mode"])
            for row in rows
            if row.get("process", 1) == process and row["status"] != "not_run"
        }
        return [program for program in chosen if not all((program.name, mode) in done for mode in given.modes)]

    common = _common()
    try:
        with tempfile.TemporaryDirectory(prefix="encore-programs-") as cache:
            for process in range(1, given.processes + 1):
                if time.monotonic() < deadline and (left := remain(process)):
                    Conductor(given, {**common, "process": process}, tell, Path(cache), deadline).run(left)
    except KeyboardInterrupt:
        print(f"interrupted; {len(rows)} rows were written", file=sys.stderr)
        return INTERRUPTED
    left = sum(len(remain(process)) for process in range(1, given.processes + 1))
    if given.processes > 1 and left:
        print(f"{left} runs of programs remain; start again with the same --out to go on", file=sys.stderr)
    return max(_verdict([rows]), int(left > 0))


def _verdict(runs: Sequence[Sequence[rows_of.Row]]) -> int:
    """Print what the rows say, the table of the last process first. Return the exit code."""
    processes = floor.by_process(runs)
    if len(runs) == 1 and processes:
        print(rows_of.table(processes[-1]))
    speeds = floor.speeds(processes)
    if speeds:
        print(*floor.brief(speeds), sep="\n")
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    seconds, count = _above_zero(float), _above_zero(int)
    parser.add_argument("--only", metavar="NAMES", help="programs or families, separated by commas; default: all")
    parser.add_argument("--device", choices=MODES, default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for testing the script")
    parser.add_argument("--seconds", type=seconds, default=360.0, metavar="LIMIT", help="time for all (360)")
    parser.add_argument("--processes", type=count, default=1, metavar="N", help="run each program so often (1)")
    parser.add_argument("--jobs", type=count, metavar="N", help="processes at a time; default: cores less two")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the rows to this file")
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="draw the table of these rows and end; of several files, how fast each program was in each",
    )
    return parser


def _above_zero(kind: Any) -> Any:
    def parse(text: str) -> Any:
        if not 0 < (value := kind(text)) < 1e6:
            raise argparse.ArgumentTypeError(f"{text} is no number above 0")
        return value

    return parse


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the script as Ctrl-C does
    sys.exit(main())
