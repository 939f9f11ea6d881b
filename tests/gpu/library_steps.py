#!/usr/bin/env python3
"""Training programs of libraries under `graph_step`, next to eager, bit for bit.

    python tests/gpu/library_steps.py --out rows.jsonl               on a GPU, all of them
    python tests/gpu/library_steps.py --out rows.jsonl --part 0/4    a quarter, for one of several GPUs
    python tests/gpu/library_steps.py --out rows.jsonl --device cpu --only pinn   with the stand-in for a GPU
    python tests/gpu/library_steps.py --out rows.jsonl --check-every 1       every call audited: all pass
    python tests/gpu/library_steps.py --table rows.jsonl             how many came out how

A row is written once its program is through; programs that have one are not run again. A program that needs a library
which is not installed is not run. Rows say how far results are from eager's and how often the step was replayed.
Exit codes: 0 fine; 1 results that are not eager's and that nothing explains, an error that eager does not have, a
process that ended; 2 wrong use; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).resolve().parent
sys.path[:0] = [str(SOURCES), str(SOURCES.parent / "support"), str(SOURCES.parents[1])]

from library_programs.compare import BAD, row  # noqa: E402
from library_programs.record import programs  # noqa: E402
from row_files import RowFile, read_rows  # noqa: E402
from worker_pool import Pool, serve  # noqa: E402

INTERRUPTED = 130
PROGRAM_S = 150.0
"""Most time for a program."""
ENDED = "ended the process"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.worker:
        return _work(given.worker, given.check_every)
    try:
        if given.table:
            return _table(read_rows(given.table, is_row))
        if given.out is None or not given.out.parent.is_dir():
            parser.error("--out needs a file in a folder that exists")
        rows = RowFile(given.out, is_row)
    except (OSError, ValueError) as error:
        parser.error(f"{given.table or given.out} cannot be read as rows: {error}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no NVIDIA GPU here; `--device cpu` runs the programs with a stand-in for one")
    (part, parts), done = given.part, {one["name"] for one in rows.rows}
    try:
        run([name for name in _chosen(given.only, parser)[part::parts] if name not in done], rows, given)
    except KeyboardInterrupt:
        return INTERRUPTED
    return _table(rows.rows)


def is_row(row: dict[str, Any]) -> bool:
    return {"name", "verdict"} <= row.keys()


def run(names: Sequence[str], rows: RowFile, given: argparse.Namespace, worker: Sequence[str] = ()) -> None:
    """Add a row of each program. One that ends its process, or takes too long, has one that says so."""

    def tell(found: dict[str, Any]) -> None:
        if ended := found.get("wrong") or found.get("skipped"):
            found = {"name": found["task"], "verdict": ENDED, "code": ended}
        rows.add(found)
        print(f"{found['name']}: {found['verdict']}, {found.get('replays', 0)} replays", flush=True)

    audits = [] if given.check_every is None else ["--check-every", str(given.check_every)]
    command = worker or (__file__, "--worker", given.device, *audits)
    log = given.out.with_suffix(".log")
    jobs = [(name, ("step",)) for name in names]
    Pool(command, jobs, tell, size=given.jobs, log=log, timeout_s=PROGRAM_S).run()


def _work(device: str, check_every: int | str | None) -> int:
    def prepare() -> None:
        if device == "cuda":
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        else:
            torch.set_num_threads(1)
        programs()

    def rows(name: str, parts: Sequence[str], say: Any) -> Iterator[dict[str, Any]]:
        say({"begin": parts[0]})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield row(name, programs()[name], device, check_every)

    return serve(prepare, rows, torch.cuda.empty_cache if device == "cuda" else lambda: None)


def _table(rows: Sequence[dict[str, Any]]) -> int:
    counted = Counter((bool(one.get("replays")), one["verdict"]) for one in rows)
    print("| programs | replayed | results |\n| --- | --- | --- |")
    for (replayed, verdict), count in sorted(counted.items(), key=lambda item: (-item[0][0], -item[1], item[0][1])):
        print(f"| {count} | {'yes' if replayed else 'no'} | {verdict} |")
    bad = [one for one in rows if one["verdict"] in {*BAD, ENDED}]
    for one in bad:
        print(f"{one['name']}: {one['verdict']}: {one.get('error') or one.get('far') or one.get('code')}")
    return 1 if bad else 0


def _chosen(only: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    known = sorted(programs())
    for part in only:
        if not any(part in name for name in known):
            parser.error(f"no program has {part!r} in its name; there are {', '.join(known)}")
    return [name for name in known if not only or any(part in name for part in only)]


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text}: write I/N, I from 0 to N - 1")
    return int(part), int(parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="rows are added to this file")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="programs with this in their names")
    parser.add_argument("--part", type=_part, default=(0, 1), metavar="I/N", help="every N-th program, beginning at I")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--check-every",
        type=lambda text: text if text == "auto" else int(text),
        metavar="N",
        help='audit every N-th call of a recording, or "auto"; without it none is audited',
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="count what came of the programs in these rows")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time (1)")
    parser.add_argument("--worker", choices=("cuda", "cpu"), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
