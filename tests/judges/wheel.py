"""PyTorch's own databases of operators, modules and optimizers, under plain compile, stock's graphs and Encore.

    python -m tests.judges.wheel OUT                             on a GPU
    python -m tests.judges.wheel OUT --device simulated          without one: plain compile and Encore
    python -m tests.judges.wheel OUT --only linalg.svd,add       entries whose names these are
    python -m tests.judges.wheel OUT --resume FILE.jsonl.gz      what a recorded run left over

Each sample is called several times, with inputs at new addresses and of new values: eager, then under each compiler.
Rows go to OUT/rows.jsonl, one for each sample and compiler. A run that ended early continues if it is started again
with the same OUT. One sample of every entry comes first. OUT/summary.txt has the tables and the findings.

Exit codes: 0 fine, also if samples remain; 1 a sample passes under plain compile and fails under Encore; 2 wrong use;
130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import ROW_FILES
from . import rows as rows_of
from .databases import DATABASES, Task, tasks
from .pool import Job, Pool
from .trial import COMPILERS

INTERRUPTED = 130
CALLS = {"cuda": 16, "simulated": 6}
"""Calls of each sample: after eight Encore may examine a graph's inputs; before the last it has replaced the graph."""

DEVICES = {"cuda": tuple(COMPILERS), "simulated": ("compile", "encore")}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    compilers = tuple(given.compilers.split(",")) if given.compilers else DEVICES[given.device]
    for compiler in compilers:
        if compiler not in DEVICES[given.device]:
            parser.error(f"--compilers: {compiler!r} is none of {', '.join(DEVICES[given.device])}")
    given.calls = given.calls or CALLS[given.device]
    databases = tuple(given.databases.split(","))
    for database in databases:
        if database not in DATABASES:
            parser.error(f"--databases: {database!r} is none of {', '.join(DATABASES)}")
    if given.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("PyTorch finds no NVIDIA GPU here; `--device simulated` needs none")
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        return _run(given, databases, compilers)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ValueError as error:  # rows of another script
        parser.error(str(error))
    except OSError as error:
        print(f"wheel: {error.strerror or error}: {error.filename or given.out}", file=sys.stderr)
        return 1


def _run(given: argparse.Namespace, databases: Sequence[str], compilers: tuple[str, ...]) -> int:
    deadline = time.monotonic() + given.seconds
    path = given.out / "rows.jsonl"
    rows = begun_rows(path, given.resume)
    counted = [row for row in rows if row.get("task") not in failed_tasks(rows)] if given.again else list(rows)
    chosen = _chosen(given, databases)
    jobs = remaining(chosen, counted, compilers)
    print(f"{len(jobs)} samples to judge in {given.jobs} processes", file=sys.stderr)
    begun = time.monotonic()
    judged = len(jobs)
    with tempfile.TemporaryDirectory() as cache, path.open("a", encoding="utf-8") as out:
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            out.write("\n")

        def tell(row: dict[str, Any]) -> None:
            rows.append(row)
            counted.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()

        everything = tasks(DATABASES, _where(given))
        here = {
            **facts(given.device, compilers), "shard": "{}/{}".format(*given.shard), "calls": given.calls
        }  # fmt: skip
        tell({"run": {**here, "remain": len(remaining(everything, counted, compilers))}})
        pool = Pool(
            jobs, given.device, given.jobs, deadline - given.margin, given.timeout, given.out / "workers.log", tell,
            {
                "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
                "TRITON_CACHE_DIR": f"{cache}/triton",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                "OMP_NUM_THREADS": "1",
                "ENCORE_JUDGE_CALLS": str(given.calls),
                # Without a GPU a process would find out for half a minute which vector instructions it can use.
                **({} if given.device == "cuda" else {"TORCHINDUCTOR_VEC_ISA_OK": "0"}),
            },
        )  # fmt: skip
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            pool.run()
        finally:
            left = len(remaining(chosen, counted, compilers))
            judged -= left
            tell({"run": {**here, "remain": len(remaining(everything, counted, compilers))}})
            text = rows_of.summary(rows)
            (given.out / "summary.txt").write_text(text + "\n", "utf-8")
            keep_end(given.out / "workers.log")
    print(rows_of.table(rows))
    seconds = time.monotonic() - begun
    print(f"{judged} samples in {seconds:.0f} s, {60 * judged / seconds:.0f} a minute; {left} remain")
    found = rows_of.findings(rows)
    for line in found:
        print(f"FINDING: {line}")
    if pool.failed_starts:
        print("wheel: workers end before they are ready; see workers.log", file=sys.stderr)
        return 1
    return 1 if found else 0


def begun_rows(path: Path, resume: Path | None) -> list[dict[str, Any]]:
    """Return the rows that `path` has; where there is no such file it is made, with the rows of `resume`."""
    if resume is not None and not path.exists():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows_of.read(resume)), "utf-8")
    return rows_of.read(path) if path.exists() else []


def failed_tasks(rows: Sequence[rows_of.Row]) -> set[str]:
    """Return the samples that fail under plain compile or under Encore, with whatever code their rows are of."""
    samples = rows_of.by_task(rows).items()
    return {
        key for key, of in samples if not all(of[name].get("passed") for name in of if name in ("compile", "encore"))
    }


def remaining(chosen: Sequence[Task], rows: Sequence[rows_of.Row], compilers: Sequence[str]) -> list[Job]:
    """Return the samples that have no rows yet, with the compilers that are missing."""
    done = rows_of.by_task(rows)
    found = []
    for task in chosen:
        has = done.get(task.key, {})
        missing = tuple(compiler for compiler in compilers if compiler not in has)
        if missing and "eager" not in has:
            found.append((task.key, missing))
    return found


def _chosen(given: argparse.Namespace, databases: Sequence[str]) -> list[Task]:
    chosen = tasks(databases, _where(given))
    if given.only:
        names = given.only.split(",")
        chosen = [task for task in chosen if task.name in names or task.key in names]
    if given.samples:
        chosen = [task for task in chosen if task.number < given.samples]
    part, parts = given.shard
    return chosen[part - 1 :: parts]


def _where(given: argparse.Namespace) -> str:
    return "cpu" if given.device == "simulated" else str(given.device)


def facts(device: str, compilers: Sequence[str]) -> dict[str, Any]:
    """Return the row that names device, versions and commit of a run."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else device
    return {**ROW_FILES.facts(name), "compilers": compilers}


def keep_end(log: Path, limit: int = 4 * 2**20) -> None:
    """Cut the beginning of a log that is too long."""
    if log.exists() and log.stat().st_size > limit:
        log.write_bytes(log.read_bytes()[-limit:])


def _parser() -> argparse.ArgumentParser:
    assert __doc__
    parser = argparse.ArgumentParser(
        prog="wheel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for rows, summary and log (three files)")
    parser.add_argument("--device", choices=tuple(DEVICES), default="cuda")
    parser.add_argument("--databases", default=",".join(DATABASES), metavar="NAMES", help="default: all")
    parser.add_argument("--compilers", metavar="NAMES", help="default: all that the device can run")
    parser.add_argument("--only", metavar="NAMES", help="entries or samples, separated by commas")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="rows of an earlier run, packed or not, to go on from"
    )
    parser.add_argument("--again", action="store_true", help="judge once more what failed, also under plain compile")
    parser.add_argument("--samples", type=count, metavar="N", help="at most so many of each entry, variant and dtype")
    parser.add_argument("--calls", type=count, metavar="N", help="of each sample; 16 on a GPU, else 6")
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="the I-th of N parts")
    parser.add_argument("--seconds", type=count, default=540, metavar="LIMIT", help="for all of it (540)")
    parser.add_argument("--timeout", type=count, default=90, metavar="SECONDS", help="for one compiler (90)")
    parser.add_argument("--jobs", type=count, default=max(1, len(os.sched_getaffinity(0)) - 3), metavar="N")
    parser.add_argument("--margin", type=int, default=5, help=argparse.SUPPRESS)
    return parser


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return value


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text} is no part such as 1/4")
    return int(part), int(parts)


if __name__ == "__main__":
    sys.exit(main())
