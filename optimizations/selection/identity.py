"""What a verdict is stored under: the generated code, and everything else that decides how fast it is."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from optimizations.selection.verdict import Circumstances

_DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+(\S+)")
_COMMENT = re.compile(r"^\s*#( |$)")
"""Of Python; a line of C++ for the preprocessor is none."""


def graph_digest(
    generated: Callable[..., Any],
    integers: Sequence[int],
    extra: Sequence[str] = (),
    read: Callable[[str], str] = str,
) -> str | None:
    """SHA-256 of a function that Inductor generated, with its kernels; None where its source cannot be read.

    Lines that are comments are left out: they hold paths of one machine. `integers` are the sizes it is called with,
    `extra` is what else makes it another graph. `read` changes the code before.
    """
    plain = getattr(generated, "__func__", generated)
    try:
        source_file = inspect.getsourcefile(plain)
        if source_file is None:
            return None
        state = Path(source_file).stat()
        code = _code_digest(source_file, state.st_mtime_ns, state.st_size, read)
    except (OSError, TypeError, ValueError):
        return None
    parts = (code, getattr(plain, "__qualname__", ""), ",".join(map(str, integers)), *extra)
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()


@functools.lru_cache(maxsize=256)
def _code_digest(path: str, mtime_ns: int, size: int, read: Callable[[str], str]) -> str:
    """Of a file in this state. Hundreds of partitions, and of shapes, are in one file."""
    lines = Path(path).read_text().splitlines()
    code = "\n".join(line for line in lines if not _COMMENT.match(line))
    return hashlib.sha256(read(code).encode(errors="surrogatepass")).hexdigest()


def circumstances(graph: str, options: str, objective: Any, device_index: int) -> Circumstances:
    """What a verdict about this graph holds for, on this machine, if inputs do not move."""
    return Circumstances(
        graph=graph,
        options=options,
        objective=objective,
        gpu=_gpu(device_index),
        driver=driver_version(),
        host=_processor(),
        torch=torch.__version__,
        encore=_encore(),
        moving=False,
    )


@dataclass(frozen=True, slots=True)
class Here:
    """What there is on this machine of what verdicts hold for. `gpus` is empty, and `driver` says nothing, where no GPU
    can be used."""

    gpus: tuple[str, ...]
    driver: str
    host: str
    torch: str
    encore: str

    def differences(self, found: Circumstances) -> tuple[str, ...]:
        """What is not as a verdict has it, for people. Whether a GPU or a driver is cannot be said without a GPU."""
        same = {
            "GPU": not self.gpus or found.gpu in self.gpus,
            "driver": not self.gpus or found.driver == self.driver,
            "processor": found.host == self.host,
            "torch": found.torch == self.torch,
            "Encore": found.encore == self.encore,
        }
        return tuple(name for name, is_same in same.items() if not is_same)

    def of_other_versions(self, found: Circumstances) -> bool:
        """Whether a verdict is of other versions than there are here. Of the driver's that is said where GPU and
        processor are the same: a folder may be shared by machines that have others."""
        differ = self.differences(found)
        return "torch" in differ or "Encore" in differ or differ == ("driver",)


def here() -> Here:
    """See `Here`."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return Here(tuple(map(_gpu, gpus)), driver_version(), _processor(), torch.__version__, _encore())


@functools.cache
def _gpu(device_index: int) -> str:
    properties = torch.cuda.get_device_properties(device_index)
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.multi_processor_count} multiprocessors, {properties.total_memory} bytes"
    )


@functools.cache
def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The version of the NVIDIA driver, from its kernel module, else from NVML; "unknown" where neither tells."""
    try:
        found = _DRIVER.search(path.read_text(errors="replace"))
    except OSError:
        found = None
    return found[1] if found else _driver_by_nvml() or "unknown"


def _driver_by_nvml() -> str | None:
    """Where the module has no such file, as under Windows. It comes with PyTorch, but not with each release of it."""
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        try:
            return str(nvml.system_get_driver_version())
        finally:
            nvml.shutdown()
    except Exception:  # no binding, no library, no driver, or one that says nothing
        return None


@functools.cache
def _processor(path: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name: how long the host takes to launch is half of what is compared."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


@functools.cache
def _encore() -> str:
    """Version and a digest of the backend's code: a checkout changes without its version."""
    try:
        released = version("encore")
    except PackageNotFoundError:
        released = "unknown"
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parents[1]
    for path in sorted(package.rglob("*.py")):
        if not path.is_file():  # the lock of an editor in a checkout: a link to nothing
            continue
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{released}+{digest.hexdigest()[:16]}"
