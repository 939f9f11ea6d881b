"""Prepare a quiet host for measurements: `check` tells what disturbs them, `tune` changes it, `restore` undoes it.

A replay is a few microseconds of host work. Frequency changes, sleep states and neighbours are of that size, so a
ratio between two modes can be one of host states. Nothing here is needed to use Encore, `check` only reads, and
`tune` changes only the settings named on its command line. Run as `python -m host_tuning check|tune|restore`.
"""

from host_tuning.check import Disturbance, Finding, check

__all__ = ["Disturbance", "Finding", "check"]
