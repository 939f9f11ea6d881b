"""Why a cell could not be measured, where it is not the program's own exception. Imports no torch."""

from __future__ import annotations

from suite.results.schema import Correctness, Status


class CellError(Exception):
    """The cell cannot be measured; `status` is how it ends."""

    status = Status.RUN_ERROR


class Unsupported(CellError):
    """This machine cannot run the cell."""

    status = Status.UNSUPPORTED


class OomExpected(CellError):
    """The workload needs more memory than this GPU has; nothing was put on it."""

    status = Status.OOM_EXPECTED


class OomTogether(CellError):
    """The modes that should be on this GPU at the same time need more memory than it has; fewer may fit."""

    status = Status.OOM


class Inaccurate(CellError):
    """The mode computes something else than eager."""

    status = Status.FAIL_ACCURACY

    def __init__(self, correctness: Correctness) -> None:
        self.correctness = correctness
        super().__init__(
            f"{correctness.worst} differs from eager by a relative error of {correctness.max_relative_error:.3g}, "
            f"allowed is {correctness.tolerance:.3g} for {correctness.compute_dtype}"
        )
