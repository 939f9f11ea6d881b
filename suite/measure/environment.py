"""Record the environment of a run: everything that others need to evaluate or repeat it, without the machine's name.

torch is not imported. The record has no host name, no user name and no path of the machine.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path

import psutil
from pydantic import JsonValue

from suite.measure.gpu import Gpu, NoGpu, find_gpu
from suite.results.schema import SCHEMA_VERSION, CpuInfo, Environment
from suite.results.store import REPOSITORY

CODE = ("encore", "suite", "models", "optimizations", "pyproject.toml", "requirements.lock")
"""Files that shape numbers, at the top of the repository: the dirty flag and the code id are about these, so that a
newly drawn figure changes neither."""

SHOWN_DIGITS = 12
"""Number of digits of a code id in texts."""

MUST_AGREE = ("torch", "torch_cuda", "cudnn", "driver", "python")
"""Environment fields that must be equal for all rows of a run, in addition to the schema's version and the code. Parts
of GPU, CPU and packages are compared as well."""


def collect(run_id: str, command_line: Sequence[str], settings: Mapping[str, JsonValue]) -> Environment:
    """Return the environment of a run that starts now on this machine."""
    torch, cuda = _torch_versions()
    gpu: Gpu | None = None
    with suppress(NoGpu):
        gpu = find_gpu()
    commit, dirty = git_state(REPOSITORY)
    packages = _packages()
    return Environment(
        schema_version=SCHEMA_VERSION,
        run_id=run_id,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command_line=[without_folder(argument) for argument in command_line],
        git_commit=commit,
        git_dirty=dirty,
        code=code_id(REPOSITORY),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        packages=packages,
        torch=torch,
        torch_cuda=cuda,
        cudnn=packages.get("nvidia-cudnn-cu13") or packages.get("nvidia-cudnn-cu12"),
        driver=gpu.driver if gpu else None,
        gpu=gpu.info if gpu else None,
        gpu_count=gpu.count if gpu else 0,
        cpu=cpu_info(),
        settings=dict(settings),
    )


def differences(there: Environment, here: Environment) -> list[str]:
    """Return differences that prevent comparing rows of two environments, as "torch: 2.11.0 there, 2.12.0 here".

    A different GPU of the same model is no difference, because a rented machine is rarely the same one twice. Nor is a
    different commit of the same code, or the uncommitted code, if both runs have an id of their code.
    """
    pairs: dict[str, tuple[object, object]] = {"schema_version": (there.schema_version, here.schema_version)}
    if there.code is None or here.code is None:
        pairs["git_commit"] = (there.git_commit, here.git_commit)
        pairs["git_dirty"] = (there.git_dirty, here.git_dirty)
    elif there.code != here.code:
        pairs["code"] = (shown_code(there.code), shown_code(here.code))
    pairs.update({name: (getattr(there, name), getattr(here, name)) for name in MUST_AGREE})
    for name in ("name", "compute_capability", "memory_bytes"):
        pairs[f"gpu {name}"] = (getattr(there.gpu, name, None), getattr(here.gpu, name, None))
    for name in ("model", "logical_cores"):
        pairs[f"cpu {name}"] = (getattr(there.cpu, name), getattr(here.cpu, name))
    for name in sorted(there.packages.keys() | here.packages.keys()):
        pairs[f"package {name}"] = (there.packages.get(name), here.packages.get(name))
    return [f"{name}: {old} there, {new} here" for name, (old, new) in pairs.items() if old != new]


def git_state(repository: Path) -> tuple[str | None, bool | None]:
    """Return (commit, whether code differs from it); Nones where the folder is not its own git checkout."""
    commit = _git(repository, "rev-parse", "HEAD")
    if commit is None or _git(repository, "rev-parse", "--show-prefix") != "":
        return None, None
    status = _git(repository, "status", "--porcelain", "--untracked-files=normal", "--", *CODE)
    return commit, None if status is None else bool(status)


def code_id(repository: Path) -> str:
    """Return the SHA-256, in hexadecimal, of the names and contents of the current code, committed or not.

    Equal ids mean equal code, independently of commits.
    """
    digest = hashlib.sha256()
    for folder in CODE:
        for path in sorted([repository / folder, *(repository / folder).rglob("*")]):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(repository)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def shown_code(code: str | None) -> str | None:
    """Return the first digits of a code id, for texts."""
    return None if code is None else code[:SHOWN_DIGITS]


def _git(repository: Path, *arguments: str) -> str | None:
    """Return what git prints; None where it fails. Without its optional locks, `git status` leaves the index as it
    is."""
    command = ["git", "--no-optional-locks", "-C", str(repository), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return os.fsdecode(done.stdout).strip()


def without_paths(text: str) -> str:
    """Return the text with folders of this machine replaced by symbols: `.`, `<python>`, `~`, `<tmp>`."""
    folders = {
        str(REPOSITORY): ".",
        sys.prefix: "<python>",
        sys.base_prefix: "<python>",
        **_home(),
        tempfile.gettempdir(): "<tmp>",
    }
    for folder in sorted((f for f in folders if f != "/"), key=len, reverse=True):
        text = re.sub(rf"{re.escape(folder)}(?![\w.-])", folders[folder].replace("\\", r"\\"), text)
    return text


def without_folder(argument: str) -> str:
    """Return a command-line argument with an absolute path in it reduced to the last part of that path."""
    option, equals, value = argument.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if value.startswith(("/", "~")) else argument


def _torch_versions() -> tuple[str, str | None]:
    """Return (torch version with its local part, CUDA version) from torch's version file, without importing torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return "not installed", None
    names = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    return str(names["__version__"]), names["cuda"]


def _packages() -> dict[str, str]:
    # Once setuptools is imported, its own copies of other packages are on the path.
    there = [item for item in distributions() if item.name and Path(str(item.locate_file(""))).name != "_vendor"]
    return dict(sorted((re.sub(r"[-_.]+", "-", item.name).lower(), item.version) for item in there))


def cpu_info(proc: Path = Path("/proc"), sys_devices: Path = Path("/sys/devices/system")) -> CpuInfo:
    """Return Linux's description of the CPU; fields missing in a container or virtual machine are None."""
    names = re.findall(r"^model name\s*:\s*(.+)$", _read(proc / "cpuinfo") or "", re.MULTILINE)
    smt = _read(sys_devices / "cpu" / "smt" / "active")
    nodes = sum(1 for _ in (sys_devices / "node").glob("node[0-9]*"))
    return CpuInfo(
        model=names[0].strip() if names else platform.machine(),
        logical_cores=len(os.sched_getaffinity(0)),
        physical_cores=psutil.cpu_count(logical=False),
        governor=_read(sys_devices / "cpu" / "cpu0" / "cpufreq" / "scaling_governor"),
        smt=None if smt is None else smt == "1",
        numa_nodes=nodes or None,
        memory_bytes=psutil.virtual_memory().total,
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _home() -> dict[str, str]:
    """Return the user's home directory and its short name; empty for a user id without an account."""
    try:
        return {str(Path.home()): "~"}
    except (RuntimeError, KeyError):
        return {}
