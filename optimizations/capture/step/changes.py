"""Decide how to handle a Python value that changes between calls: compare it, exclude it, or refuse the step.

A value that is not named by code that ran cannot affect the step: it is excluded from the comparison
(`report().not_compared`). A named value gets a recording for each of its values. If it changes on every call, so that
nothing is ever replayed, the step is refused.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

from optimizations.capture.signature import PLAIN, exact, parts
from optimizations.capture.step.host_state import CELL, HostState
from optimizations.capture.step.user_code import (
    ENCORE,
    STEPS,
    all_names,
    functions_of,
    is_users_file,
    last_word,
    line_with,
    with_inner,
)
from optimizations.capture.step.watch import SIZE, Ignore, Value, compared, is_dropped, is_of_module, is_plain
from optimizations.report.steps import Refusal

MOST_VALUES = 6
"""Different values without a replay in between, after which a value counts as changing on every call."""
MOST_NAMES = 4


class UsedNames:
    """Store the names in code that ran, separately for the program's own code.

    Attributes:
        code: code objects of the program's own functions that ran.
        known: a call was observed.
    """

    def __init__(self) -> None:
        self._users: set[str] = set()
        self._keys: set[str] = set()
        self._every: set[str] = set()
        self._ran: dict[int, types.CodeType] = {}
        self._taken_in: dict[int, types.CodeType] = {}
        self._unknown = False
        self.code: list[types.CodeType] = []
        self.known = False

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, and collect the code of all functions that it calls, by `sys.setprofile`.

        If the program has set a profiler, nothing is collected, and every name counts as used.
        """
        if sys.getprofile() is not None:
            self._unknown = True
            return function(*args, **kwargs)
        sys.setprofile(self._note)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setprofile(None)

    def _note(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._ran[id(frame.f_code)] = frame.f_code

    def take_in(self, state: HostState) -> None:
        """Add the names in code that ran in a call.

        Dynamo replaces compiled functions by generated code, so these functions and those they call count as run.
        """
        self.known = True
        ran, self._ran = [*self._ran.values()], {}
        if state.compiled:
            kinds = {type(module) for module in state.modules.values()}
            of_modules = [function.__code__ for kind in kinds for function in functions_of(kind)]
            ran += _with_called([*of_modules, *state.compiled_code], state.code)
        for code in ran:
            if id(code) in self._taken_in or code.co_filename.startswith(ENCORE):
                continue
            self._taken_in[id(code)] = code
            self._every |= all_names(code)
            if is_users_file(code.co_filename):
                self.code.append(code)
                self._users |= all_names(code)
            if not _is_of_an_optimizer(code):
                self._keys.update(one for one in code.co_consts if isinstance(one, str))

    def has(self, one: Value) -> bool:
        """Return whether code that ran names an entry: an attribute, variable or key; a list by its own name.

        Attributes of the program's own objects count as named where the program's own code names them. Entries of
        modules and optimizers are always read.
        """
        container, key = one.container, one.key
        if self._unknown or container.always_read:
            return True
        names = self._every if container.of_library or not container.is_attributes else self._users
        return (key if isinstance(key, str) and key != CELL else last_word(container.path)) in names

    def has_key(self, key: str) -> bool:
        """Return whether code that ran, other than PyTorch's optimizers, may use this key."""
        return not self.known or self._unknown or key in self._keys

    def has_path(self, path: str) -> bool:
        """Return whether the program's own code that ran has the last name of a path."""
        return self._unknown or last_word(path) in self._users


def _is_of_an_optimizer(code: types.CodeType) -> bool:
    path = code.co_filename
    return "/torch/optim/" in path and not path.endswith(("lr_scheduler.py", "swa_utils.py"))


def _with_called(first: Iterable[types.CodeType], others: Iterable[types.CodeType]) -> list[types.CodeType]:
    """Return code objects, their nested ones, and those of `others` that they call by name, recursively."""
    found = [code for one in first for code in with_inner(one)]
    left = {one.co_name: one for one in others}
    for code in found:  # the list grows during the loop
        found += [inner for name in code.co_names if name in left for inner in with_inner(left.pop(name))]
    return found


class Changes:
    """Track the changing values of one step. `ignored` are the names passed as `ignore=`.

    Attributes:
        dropped: names of values that are excluded from the comparison.
        names: names in code that ran.
    """

    def __init__(self, ignored: Collection[str] = ()) -> None:
        self._ignored = [name.lower() for name in ignored]
        self.dropped: set[str] = set()
        self.names = UsedNames()
        self._last: dict[str, Hashable] = {}
        self._met: dict[str, set[Hashable]] = {}
        self._replays = 0

    def _is_ignored(self, name: str) -> bool:
        """Return whether an entry is one of `ignored`, in which the first name may be `self`."""
        lower = name.lower()
        rest = lower.partition(".")[2]
        return any(lower == one or (one.startswith("self.") and rest == one[5:]) for one in self._ignored)

    def take_in_names(self, state: HostState) -> None:
        """Add the names in code that ran. An excluded value that is named now is compared again.

        Recordings from before need no change: the code that they were recorded from did not name it.
        """
        self.names.take_in(state)
        named = {name for name in self.dropped if self.names.has_path(name) and not self._is_ignored(name)}
        self.dropped -= named

    def note(
        self, state: HostState, ignore: Ignore, given: Iterable[tuple[str, Any]], replays: int
    ) -> tuple[frozenset[tuple[str, Hashable]], Refusal | None]:
        """Compare what a call without a matching recording reaches with what such calls before it reached.

        Args:
            state: what the step reaches.
            ignore: entries that may change.
            given: the arguments by name.
            replays: number of calls replayed so far.

        Returns:
            The compared values of `PLAIN` types with their names, and a refusal if values change on every call.
        """
        if replays != self._replays:
            self._replays, self._met = replays, {}
        found, is_first = compared(state, ignore), not self._last
        if self._ignored:
            self.dropped.update(filter(self._is_ignored, found))
        for where, nest in given if self.names.known else ():
            for name, value, _ in parts(nest, where):
                if type(value) in PLAIN:
                    self._met.setdefault(f"{name} (argument)", set()).add(exact(value))
        for name, new in found.items():
            is_added, old = name not in self._last, self._last.get(name)
            self._last[name] = new.token
            if is_first or not self.names.known or old == new.token or is_dropped(name, self.dropped):
                continue
            if self.names.has(new):
                if not is_added and _is_number(new):
                    self._met.setdefault(name, {old}).add(new.token)
            elif new.container.is_attributes and not is_of_module(new.container) if is_added else is_plain(new.value):
                by_name = new.container.is_attributes or isinstance(new.key, str)
                self.dropped.add(name if by_name else new.container.path)
        changing = [name for name, met in self._met.items() if len(met) >= MOST_VALUES]
        numbers = ((name, one.token) for name, one in found.items() if _is_number(one))
        kept = frozenset(one for one in numbers if not is_dropped(one[0], self.dropped))
        return kept, self._refusal(changing) if changing else None

    def _refusal(self, names: Sequence[str]) -> Refusal:
        if of_arguments := [name.removesuffix(" (argument)") for name in names if name.endswith(" (argument)")]:
            return Refusal(
                f"is given {named(of_arguments)}",
                "leave it out where the step does not need it, decide by it outside of the step, or pass it as a "
                "tensor on the GPU",
            )
        place: tuple[str, ...] = (names[0],)
        if all(_OF_A_GROUP in name for name in names):
            advice = _ON_RATES if any(name.endswith("['lr']") for name in names) else _ON_OTHER_NUMBERS
            place = names[0].partition(_OF_A_GROUP)[0], STEPS
        else:
            advice = (
                "pass it as an argument or as a tensor on the GPU; if it decides nothing, name it in "
                f'graph_step(step, ignore=("{names[0]}",))'
            )
        return Refusal(f"reads {named(names)}", advice, line_with(self.names.code, *place))


def _is_number(one: Value) -> bool:
    """Return whether an entry is compared by its value, and is not the number of settings of an optimizer."""
    return is_plain(one.value) and not (one.key is SIZE and one.container.always_read)


def named(names: Iterable[str]) -> str:
    """Return a list of names, which change on every call."""
    found = sorted(names)
    more = f" and {len(found) - MOST_NAMES} more" if len(found) > MOST_NAMES else ""
    change = "change" if len(found) > 1 else "changes"
    return f"{', '.join(found[:MOST_NAMES])}{more}, which {change} on every call"


_OF_A_GROUP = ".param_groups["
_ON_RATES = (
    "make the optimizer with capturable=True or fused=True, which takes a learning rate that changes, or give one of "
    "your own a tensor on the GPU (`lr=torch.tensor(0.1, device='cuda')`), by which it multiplies; read and set the "
    "rate outside of the step"
)
_ON_OTHER_NUMBERS = (
    "change it seldom, for each value gets a graph of its own; make a scheduler of learning rates with "
    "cycle_momentum=False"
)


def argument_names(step: Any) -> tuple[str, ...]:
    """Return the names of positional arguments in the step's code."""
    bound = isinstance(step, types.MethodType)
    code = getattr(step.__func__ if bound else step, "__code__", None)
    return code.co_varnames[int(bound) : code.co_argcount] if isinstance(code, types.CodeType) else ()
