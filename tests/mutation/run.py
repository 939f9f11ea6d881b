"""Which small changes to the code no test notices.

    python tests/mutation/run.py                               # the named ones, each with the tests that must notice it
    python tests/mutation/run.py --sample 40 suite/results/stats.py suite/measure optimizations

Each change is made in a copy of the repository, and the tests of the changed module run there. Prints the survivors and
exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mutants import NAMED, REPOSITORY, Mutant, sample

TIMEOUT_S = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files and folders to change, relative to the repository")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="N changes to PATHS in place of the named")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if bool(options.paths) != bool(options.sample):
        parser.error("give both paths and --sample N, or neither")
    if options.sample:
        files = sorted(path for name in options.paths for path in sources(REPOSITORY / name))
        jobs = [(mutant, tests_of(mutant.path)) for mutant in sample(files, options.sample, options.seed)]
    else:
        jobs = [(named.mutant(), list(named.tests)) for named in NAMED]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_repository(Path(folder) / "copy")
        for number, (mutant, tests) in enumerate(jobs, start=1):
            verdict = judge(copy, mutant, tests)
            survivors += verdict != "killed"
            print(f"{number} of {len(jobs)}: {verdict}: {mutant}", flush=True)
    print(f"{survivors} of {len(jobs)} survived")
    return 1 if survivors else 0


def sources(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def tests_of(path: Path) -> list[str]:
    """Test files that import the module, those named after it first; the slow ones with real workloads left out."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    module, parent, stem = ".".join(parts), ".".join(parts[:-1]), parts[-1]
    found = []
    for test in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        text = test.read_text(encoding="utf-8")
        if module in text or f"from {parent} import {stem}" in text or test.stem.endswith(f"_{stem}"):
            found.append((not test.stem.endswith(stem), test.relative_to(REPOSITORY).as_posix()))
    return [name for _, name in sorted(found)]


def copy_of_repository(folder: Path) -> Path:
    """The tracked files, and those that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=REPOSITORY, capture_output=True, check=True
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    return folder


def judge(copy: Path, mutant: Mutant, tests: Sequence[str]) -> str:
    """ "killed", "survived", or "no tests"."""
    if not tests:
        return "no tests"
    target = copy / mutant.path.relative_to(REPOSITORY)
    original = target.read_text(encoding="utf-8")
    target.write_text(mutant.text, encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return "killed"  # it hangs, and someone would notice
    finally:
        target.write_text(original, encoding="utf-8")
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout.decode()[-2000:]}")
    return "killed" if done.returncode else "survived"


if __name__ == "__main__":
    sys.exit(main())
