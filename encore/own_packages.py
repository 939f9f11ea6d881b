"""Import Encore's own packages, and a user's program the user's, although some have the same names.

Note [Two packages of one name]: `suite` and `models` are names that many projects have too. Encore's are found by where
this file is, whatever stands on PYTHONPATH or in the working directory. A process that runs a program of the user's
first imports all that it needs of Encore, and then gives way: from then on, names that the user has a package for mean
the user's, while Encore's code goes on with the modules it has.

Also run as a script, by its path and so under no name that could be another's: `python -P own_packages.py MODULE
ARGUMENTS...` is `python -P -m MODULE ARGUMENTS...` with Encore's own packages first.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
NAMES = frozenset({"encore", "suite", "models", "optimizations", "host_tuning"})


class OwnPackages(MetaPathFinder):
    """Find packages of these names in `ROOT`."""

    def __init__(self) -> None:
        self.names = set(NAMES)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [str(ROOT)]) if path is None and fullname in self.names else None


_finder = OwnPackages()


def put_first() -> None:
    """Find Encore's packages before any other of their names from now on."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def give_way() -> None:
    """Put the working directory first from now on, and the user's packages before Encore's.

    For a process that runs a program of the user's, once it has imported all that it needs of Encore.
    """
    folder = str(Path.cwd())
    sys.path[:] = [folder, *(entry for entry in sys.path if entry not in ("", folder))]
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
    for name in NAMES:
        if PathFinder.find_spec(name, elsewhere) is None:
            continue
        _finder.names.discard(name)
        for module in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
            del sys.modules[module]


def script(module: str) -> tuple[str, ...]:
    """Return the command that runs `module` of Encore's in a new process; its arguments are appended.

    `-P` keeps the working directory from being searched for anything.
    """
    return (sys.executable, "-P", __file__, module)


def command() -> None:
    """Run the command `encore`."""
    put_first()
    try:
        from suite.cli.main import main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in NAMES:
            raise
        sys.exit(
            f"encore: the command needs {error.name}, which is not installed; the backend alone was. Install the suite "
            "too: pip install 'encore[suite]'"
        )
    main()


def _run(module: str, arguments: Sequence[str]) -> None:
    put_first()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # The same file under its own name, so that there is one finder, which `give_way` knows.
    sys.meta_path.insert(0, _finder)
    from encore import own_packages

    sys.meta_path.remove(_finder)
    own_packages._run(sys.argv[1], sys.argv[2:])
