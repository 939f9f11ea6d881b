"""The table of appliers: each is the module of this package that `options.Choice` names."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from optimizations.graph.protocol import Applier
from optimizations.options import Choice

APPLIERS: Mapping[Choice, Applier] = {
    choice: import_module(f"optimizations.graph.{choice}").APPLIER
    for choice in Choice
    if choice not in (Choice.OFF, Choice.AUTO)
}
