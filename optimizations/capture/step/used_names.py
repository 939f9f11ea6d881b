"""Collect the names in code that ran in observed calls: only named values can affect a step."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from optimizations.capture.step.host_state import CELL, Container, HostState
from optimizations.capture.step.source_lines import last_word
from optimizations.capture.step.user_code import ENCORE, all_names, functions_of, is_users_file, with_inner


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

    def has(self, container: Container, key: Any) -> bool:
        """Return whether code that ran names an entry: an attribute, variable or key; a list by its own name.

        Attributes of the program's own objects count as named where the program's own code names them.
        """
        if self._unknown:
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
