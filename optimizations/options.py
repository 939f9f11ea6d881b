"""Define the options of the backend, as `torch.compile(..., backend="encore", options={...})` takes them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, get_args, get_origin, get_type_hints

from optimizations.selection import Selection

Concurrency = Literal["off", "auto"]
"""The values of the option `concurrency`."""

CONCURRENCY: Concurrency = "auto"
"""Its default, for compiled graphs, steps and callables. `tests/docs/test_pages.py` names the pages that say it."""


class Choice(StrEnum):
    """Choose the option `indirection`: who updates the nodes of inputs that are read in place.

    `host` is the CPU, by a driver call for each node. `prelude` is a kernel at the graph's start; the CPU takes the
    nodes that it cannot update. `auto` decides by their number.
    """

    OFF = "off"
    AUTO = "auto"
    HOST = "host"
    PRELUDE = "prelude"


class WrongOption(ValueError):
    """Report an option that does not exist, or a value it cannot have; the message names what is allowed."""


@dataclass(frozen=True, slots=True)
class Options:
    """Hold the options of the backend. The defaults are what Encore recommends.

    Attributes:
        placement: move CPU values that keep a graph from being captured to the GPU.
        hoist_limit_bytes: what one FX graph keeps on the GPU, all in all, of CPU tensors that a module or global holds.
            Their bytes are compared in each call. What exceeds the limit is sent in each call, with 0 all of it.
        stage_limit_bytes: what one FX graph sends with each call, all in all.
        process_limit_bytes: what all FX graphs of the process keep on the GPU, buffers for sending included.
        indirection: how replay passes inputs that moved. "off": they are copied, as stock PyTorch does. Otherwise
            graphs read them in place, and this says how they learn the addresses: "host" sets the graph's nodes,
            "prelude" lets a kernel in the graph do so; "auto" chooses by the number of nodes. Nodes for which a prelude
            does not work are set.
        lean: keep the host out of the way of replay: parameters and buffers of modules are not loaded one by one in
            each call, but held as long as the modules hold the same tensors; and calls of inference graphs pass by
            those wrappers of PyTorch's that have nothing to do for them.
        selection: which functions run without a CUDA graph, and which inputs a graph reads in place. "rule": numbers
            of kernels, bytes and nodes decide (`optimizations.selection`). "measure": no graph, a graph that copies its
            inputs and one that reads them in place serve 8 calls of the program each, and the fastest is kept for the
            life of the process. "off": every function that can be recorded gets a graph, which reads in place
            what it can. With indirection "off" the graphs are stock's, and nothing is selected.
        concurrency: whether kernels of a graph that do not depend on each other run at the same time. "off": one after
            the other. "auto": at the same time, where that is measured to make the graph 3 % faster, on the program's
            own calls.
        inductor: options for Inductor, by its own names ("max_autotune": True).
    """

    placement: bool = True
    hoist_limit_bytes: int = 256 * 2**20
    stage_limit_bytes: int = 64 * 2**20
    process_limit_bytes: int = 2**30
    indirection: str = Choice.AUTO.value
    lean: bool = True
    selection: Selection = "rule"
    concurrency: Concurrency = CONCURRENCY
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> Options:
        """Read options by name; the rest keep their defaults.

        Raises:
            WrongOption: a name is unknown (the message gives the nearest and all known ones) or a value is not allowed.
        """
        known = [option.name for option in dataclasses.fields(cls)]
        given = given or {}
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4)
                hint = f"did you mean {', '.join(near)}? Known" if near else "known"
                raise WrongOption(
                    f"unknown option {name!r} of backend 'encore'; {hint}: {', '.join(known)}; "
                    "options of Inductor go into 'inductor'."
                )
        options = cls(**given)
        types = {**get_type_hints(cls), "indirection": Literal[*(choice.value for choice in Choice)]}
        for name in given:
            _check(name, getattr(options, name), types[name])
        chosen = "selection" in given and options.selection != "off"
        if chosen and options.indirection == "off":
            raise WrongOption(
                f"selection={options.selection!r} needs graphs of Encore's, and with indirection='off' stock makes "
                "them; leave indirection at 'auto', or selection at 'off'."
            )
        return options


def _check(name: str, value: Any, wanted: Any) -> None:
    origin = get_origin(wanted)
    if origin is Literal:
        allowed = get_args(wanted)
        if value not in allowed:
            raise WrongOption(f"option {name!r} cannot be {value!r}; allowed: {', '.join(map(repr, allowed))}.")
        return
    kind = origin or wanted
    # bool is an int to isinstance, but True is not a number of bytes.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise WrongOption(f"option {name!r} must be {_article(kind)}, not {value!r}.")
    if kind is int and value < 0:
        raise WrongOption(f"option {name!r} is a number of bytes and cannot be {value}.")


def _article(kind: type) -> str:
    return {bool: "True or False", int: "an int"}.get(kind, f"a {kind.__name__.lower()}")
