"""Which small changes to the code no test notices: `python tests/mutation/run.py`.

Each named change is made in a copy of the repository, and the tests that must notice it run there. Prints the survivors
and exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mutants import NAMED, REPOSITORY, Named

TIMEOUT_S = 600.0


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_repository(Path(folder) / "copy")
        for number, named in enumerate(NAMED, start=1):
            verdict = judge(copy, named)
            survivors += verdict != "killed"
            print(f"{number} of {len(NAMED)}: {verdict}: {named.file}: {named.old!r} -> {named.new!r}", flush=True)
    print(f"{survivors} of {len(NAMED)} survived")
    return 1 if survivors else 0


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


def judge(copy: Path, named: Named) -> str:
    """Return "killed" or "survived"."""
    target = copy / named.file
    original = target.read_text(encoding="utf-8")
    target.write_text(named.text(copy), encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *named.tests],
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
