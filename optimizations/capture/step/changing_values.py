"""Says which values are others in each call, where this keeps a step from being replayed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from optimizations.capture.signature import PLAIN, exact
from optimizations.capture.step.host_state import HostState, Place, copy_of, key_name, place_of
from optimizations.report.steps import Refusal

MOST_VALUES = 16
"""Values met in a row, without a replay in between, after which it is said."""
MOST_NAMES = 4
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
        self.refusal = self.refusal or Refusal(f"reads {named(self._names[signature])} in each call", _ADVICE)
        return self.refusal


def named(names: Iterable[str]) -> str:
    """What is another each time."""
    found = sorted(names)
    if not found:
        return "something of Python that is another"
    more = f" and {len(found) - MOST_NAMES} more" if len(found) > MOST_NAMES else ""
    return f"{', '.join(found[:MOST_NAMES])}{more}, {'each of ' if len(found) > 1 else ''}which is another value"


Numbers = dict[Place, tuple[str, Any]]


def numbers_in(state: HostState) -> Numbers:
    """Numbers and strings that a step reaches, by where they stand: their names and values."""
    found: Numbers = {}
    for container in state.containers:
        held = container.held
        entries = copy_of(held) if isinstance(held, dict) else {None: container.content()}
        for key, value in entries.items():
            if isinstance(value, PLAIN) and (container.names is None or key in container.names):
                name = container.path if key is None else f"{container.path}.{key_name(key)}".removeprefix(".")
                found[place_of(held, key)] = name, exact(value)
    return found


def with_names(refusal: Refusal, before: Numbers, now: Numbers) -> Refusal:
    """The same reason, with what changed between two calls that were looked at."""
    changed = [name for place, (name, value) in now.items() if place in before and before[place][1] != value]
    if not changed:
        return refusal
    return replace(refusal, reason=f"{refusal.reason}, while it reads {named(changed)} in each")
