"""Says which values are others in each call, where this keeps a step from being replayed."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from optimizations.capture.signature import PLAIN, exact
from optimizations.capture.step.host_state import Container, HostState, Place, copy_of, key_name, place_of
from optimizations.report.steps import Refusal

MOST_VALUES = 16
"""Values met in a row, without a replay in between, after which it is said."""
MOST_NAMES = 4
MOST_MEMBERS = 64
"""Of a list or a set whose numbers are kept of each call that is looked at."""
_ADVICE = "pass it as a tensor on the GPU if the step needs it; else keep it elsewhere, or under another name"


@dataclass(slots=True)
class ChangingValues:
    """What differed from the recording of a signature in the calls that were looked at since the last replay."""

    refusal: Refusal | None = None
    _replays: dict[Hashable, int] = field(default_factory=dict)
    _seen: dict[Hashable, set[Hashable]] = field(default_factory=dict)
    _names: dict[Hashable, set[str]] = field(default_factory=dict)

    def note(self, signature: Hashable, host_key: Hashable, names: Iterable[str], replays: int) -> Refusal | None:
        """Take in a call that no recording fits; a reason when it is time to say so."""
        if self._replays.get(signature) != replays:
            self._replays[signature] = replays
            self._seen[signature] = set()
            self._names[signature] = set(names)
        self._seen[signature].add(host_key)
        now = set(names)
        self._names[signature] = self._names[signature] & now or now
        if len(self._seen[signature]) < MOST_VALUES:
            return None
        found = self._names[signature]
        self.refusal = self.refusal or Refusal(f"reads {named(found)} in each call", advice_on(found) or _ADVICE)
        return self.refusal


def named(names: Iterable[str]) -> str:
    """What is another each time."""
    found = sorted(names)
    if not found:
        return "something of Python that is another"
    more = f" and {len(found) - MOST_NAMES} more" if len(found) > MOST_NAMES else ""
    return f"{', '.join(found[:MOST_NAMES])}{more}, {'each of ' if len(found) > 1 else ''}which is another value"


Numbers = dict[Place, tuple[str, Any]]


def numbers_in(state: HostState, but: Callable[[Any, Any], bool]) -> Numbers:
    """Numbers, strings and tuples of such that a step reaches, by where they stand: their names and values.

    Those of a list count each, and those of a set together; both up to `MOST_MEMBERS`. `but`: entries (container, key)
    that are left out.
    """
    found: Numbers = {}
    for container in state.containers:
        held = container.held
        for key, value in _entries(container):
            if but(held, key) or not (container.names is None or key in container.names):
                continue
            name = container.path if key is None else f"{container.path}.{key_name(key)}".removeprefix(".")
            if _is_plain(value):
                found[place_of(held, key)] = name, exact(value)
            elif issubclass(type(value), tuple) and all(map(_is_plain, value)):
                found[place_of(held, key)] = name, tuple(map(exact, value))
            elif isinstance(held, set) and all(map(_is_plain, value)):
                found[place_of(held, key)] = name, frozenset(map(exact, value))
    return found


def _is_plain(value: Any) -> bool:
    """Asked of its type: a proxy of an object that is gone has no class to tell."""
    return issubclass(type(value), PLAIN)


def _entries(container: Container) -> Iterable[tuple[Any, Any]]:
    """What it holds under each key; a cell and a set under none."""
    held = container.held
    if isinstance(held, dict):
        return copy_of(held).items()
    if isinstance(held, (list, set)) and len(held) > MOST_MEMBERS:
        return ()
    return enumerate(container.content()) if isinstance(held, list) else ((None, container.content()),)


def with_names(refusal: Refusal, before: Numbers, now: Numbers) -> Refusal:
    """The same reason, with what changed between two calls that were looked at."""
    changed = [name for place, (name, value) in now.items() if place in before and before[place][1] != value]
    if not changed:
        return refusal
    reason = f"{refusal.reason}, while it reads {named(changed)} in each"
    return replace(refusal, reason=reason, advice=advice_on(changed) or refusal.advice)


def advice_on(names: Iterable[str]) -> str | None:
    """What to change where what differs are numbers of optimizers, by their names; None where something else does."""
    found = [re.search(r"param_groups\[\d+\]\.(\w+)$", name) for name in names]
    keys = list(dict.fromkeys(match.group(1) for match in found if match is not None))
    if not keys or None in found:
        return None
    return "; ".join(dict.fromkeys(_ADVICE_ON_NUMBERS.get(key, _ADVICE_ON_OTHERS) for key in keys))


_ADVICE_ON_OTHERS = "change it seldom, for each value gets a graph of its own"
_ADVICE_ON_NUMBERS = {
    "lr": "make the optimizer with capturable=True or fused=True, which takes a learning rate that changes, or give "
    "one of your own a tensor on the GPU (`lr=torch.tensor(0.1, device='cuda')`), by which it multiplies",
    "betas": "make the scheduler with cycle_momentum=False, or use Adam or AdamW with capturable=True and without "
    "fused=True, which take a first beta that changes, for parameters in float32",
    "momentum": "make the scheduler with cycle_momentum=False: a graph keeps the momentum of an optimizer",
}
