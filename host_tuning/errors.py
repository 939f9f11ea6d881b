"""Define the errors that end `python -m host_tuning`."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FINDING = 1
EXIT_WRONG_USE = 2


class HostTuningError(Exception):
    """Report a failure while working; what was changed until then is put back or named."""

    exit_code = EXIT_FINDING


class Refused(HostTuningError):
    """Report that nothing was changed: the message has the obstacles, and advice."""

    exit_code = EXIT_WRONG_USE
