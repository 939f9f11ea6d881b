"""Tests that others wrote, under plain `torch.compile`, stock's CUDA graphs and Encore: from the checkout's root,

    python -m tests.judges wheel OUT                             PyTorch's databases; the wheel has them
    python -m tests.judges wheel OUT --device simulated          without a GPU: plain compile and Encore
    python -m tests.judges wheel OUT --resume FILE.jsonl.gz      what a recorded run left over
    python -m tests.judges kornia OUT --checkout DIR             or tensordict, or diffusers
    python -m tests.judges kornia --list                         what the checkout and the machine must have
    python -m tests.judges torchbench OUT                        rows of the suite's runs in folders of OUT

Rows go to OUT/rows.jsonl, one for each sample or test and compiler, and tables and findings to OUT/summary.txt. A run
that ended early goes on if it is started again with the same OUT. Nothing is downloaded.

Exit codes: 0 fine, also if samples remain; 1 something passes under plain compile and fails under Encore, or nothing
was judged; 2 wrong use; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from row_files import RowFile

from . import projects, torchbench, wheel
from . import rows as rows_of

INTERRUPTED = 130
LOG_BYTES = 4 * 2**20
NAMES = ("wheel", *projects.PROJECTS, "torchbench")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    project = projects.PROJECTS.get(given.name)
    if given.list:
        print(project.needs() if project else "nothing but the packages of Encore's own tests")
        return 0
    if given.out is None:
        parser.error("OUT is needed")
    if given.device == "simulated" and given.name != "wheel":
        parser.error("--device simulated: only wheel runs without a GPU")
    if project and (missing := project.missing(given.checkout)):
        parser.error(f"--checkout {given.checkout} has no {', '.join(missing)}")
    if given.device == "cuda" and given.name != "torchbench":
        import torch

        if not torch.cuda.is_available():
            parser.error("PyTorch finds no NVIDIA GPU here; `wheel OUT --device simulated` needs none")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return judge(given)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ValueError as error:  # rows of another script
        parser.error(str(error))
    except OSError as error:
        print(f"judges: {error.strerror or error}: {error.filename or given.out}", file=sys.stderr)
        return 1


def judge(given: argparse.Namespace) -> int:
    """Judge until all is done or the time is over, and write the summary. Return the exit code."""
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    given.deadline = time.monotonic() + given.seconds
    rows = RowFile(given.out / "rows.jsonl", rows_of.is_row)
    if given.resume and not rows.rows:
        rows.replace(rows_of.read(given.resume))
    try:
        if given.name == "torchbench":
            rows.replace(torchbench.rows_of_runs(sorted(path.parent for path in given.out.glob("*/environment.json"))))
        else:
            _run(given, rows)
    finally:
        text = rows_of.summary(rows.rows)
        text += f"\n\n{torchbench.brief(rows.rows)}" if given.name == "torchbench" else ""
        (given.out / "summary.txt").write_text(text + "\n", "utf-8")
        for log in given.out.glob("*.log"):
            if log.stat().st_size > LOG_BYTES:
                log.write_bytes(log.read_bytes()[-LOG_BYTES:])
    print(text)
    return 1 if rows_of.findings(rows.rows) or not any("passed" in row for row in rows.rows) else 0


def _run(given: argparse.Namespace, rows: RowFile) -> None:
    with tempfile.TemporaryDirectory(prefix="encore-judge-") as cache:
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        (wheel if given.name == "wheel" else projects).run(given, rows, environment)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.judges", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="folder for rows, summary and logs")
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="of the project")
    parser.add_argument("--list", action="store_true", help="say what is needed and end")
    parser.add_argument("--device", choices=("cuda", "simulated"), default="cuda")
    parser.add_argument("--only", metavar="NAMES", help="entries, samples or files of tests, separated by commas")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="rows of an earlier run to go on from in a new OUT")
    parser.add_argument("--again", action="store_true", help="judge once more what failed, also under plain compile")
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="the I-th of N parts")
    parser.add_argument("--seconds", type=float, default=540.0, metavar="LIMIT", help="for all of it (540)")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) - 3), metavar="N")
    return parser


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text} is no part such as 1/4")
    return int(part), int(parts)


if __name__ == "__main__":
    sys.exit(main())
