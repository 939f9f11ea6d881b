"""Check what a program asks of Inductor: a mode, and options by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, get_origin

from optimizations import torch_internals
from optimizations.options import WrongOption


def patches_of(mode: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return Inductor's settings for a graph: of a mode, with CUDA graphs in any, and with the options given.

    Raises:
        WrongOption: a mode, or an option, is unknown, or has a value it cannot have.
    """
    return {**settings_of(mode), "triton.cudagraphs": True, **checked(given)}


def settings_of(mode: str | None) -> Mapping[str, Any]:
    """Return Inductor's settings of one of its modes.

    Raises:
        WrongOption: Inductor has no such mode.
    """
    modes: Mapping[str, Mapping[str, Any]] = torch_internals.list_mode_options()
    if mode is not None and mode not in modes:
        raise WrongOption(f"mode {mode!r} is not one of Inductor's; allowed: {', '.join(map(repr, modes))}.")
    return modes[mode or "default"]


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by Inductor's names for them. They may be written with hyphens, as stock takes them.

    Raises:
        WrongOption: Inductor has no such option, or it has another type.
    """
    known = torch_internals.inductor_config.get_config_copy() if given else {}
    options = {}
    for written, value in given.items():
        name = str(written).replace("-", "_")
        if name not in known:
            near = ", ".join(difflib.get_close_matches(name, known, n=3))
            hint = f"; did you mean {near}?" if near else "; torch._inductor.list_options() names all."
            raise WrongOption(f"unknown option {written!r} for Inductor, given as `inductor`{hint}")
        kind = torch_internals.inductor_config.get_type(name)
        if get_origin(kind) is None and not isinstance(value, kind):
            wanted = getattr(kind, "__name__", str(kind))
            raise WrongOption(f"option {written!r} for Inductor must be of type {wanted}, not {value!r}.")
        options[name] = value
    return options
