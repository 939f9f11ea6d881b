"""Which explanations in a folder still hold: those that this code, with this PyTorch, would make again.

The folder keeps a digest of the code (and the size) next to them. When that changes, the old explanations of the
targets asked for are removed first, so that a folder never mixes two states of the code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from pydantic import ValidationError

from models import registry
from optimizations.atomic_file import write_atomically
from suite.explain.records import Explanation
from suite.explain.run import file_name
from suite.explain.targets import Target
from suite.results.store import REPOSITORY

STAMP = ".made-by"
PACKAGES = ("encore", "suite", "models", "optimizations")


def reusable(targets: Sequence[Target], folder: Path) -> dict[Target, Explanation]:
    """Explanations in `folder` that this code made without an error; marks the folder as of this code.

    Programs of the user's and models of TorchBench's are never among them: their code is not looked at.
    """
    sizes = sorted({target.size for target in targets})
    digest = f"{code_digest()} {' '.join(sizes)}\n".encode()
    stamp = folder / STAMP
    if not stamp.is_file() or stamp.read_bytes() != digest:
        for target in targets:
            (folder / file_name(target)).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(stamp, digest)
        return {}
    own = [target for target in targets if not (target.is_program or registry.is_sourced(target.name))]
    found = {target: _read(folder / file_name(target)) for target in own}
    return {
        target: explanation
        for target, explanation in found.items()
        if explanation and explanation.size == target.size and not explanation.error
    }


def code_digest() -> str:
    """SHA-256 over the sources of the packages and the version of PyTorch."""
    digest = hashlib.sha256(version("torch").encode())
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            digest.update(str(path.relative_to(REPOSITORY)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> Explanation | None:
    try:
        return Explanation.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
