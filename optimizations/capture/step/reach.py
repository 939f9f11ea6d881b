"""Find the Python state that a step reaches, by the contract of `graph_step`.

Note [What is reached]. The walk begins at the step's arguments, `self`, closure, defaults, and the globals that its
code names. It continues with those of the program's functions and classes that it finds. Modules, optimizers, functions
and methods always count as roots. From a root the walk descends through attributes, dicts, lists, tuples and objects to
`DEPTH`. The program's own classes are followed for the globals that their methods name. Library code is not followed.

No bytecode is interpreted: `co_names` of a function lists the globals that it may use. Whether an entry affects the
step is determined when it changes (`changes`).
"""

from __future__ import annotations

import argparse
import collections
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from optimizations.capture.signature import PLAIN, parts
from optimizations.capture.static_loader import StaticLoader
from optimizations.capture.step.host_state import (
    CELL,
    KEPT_BY_MODULES,
    MODULE_HOOKS,
    OPTIMIZER_HOOKS,
    Container,
    HostState,
)
from optimizations.capture.step.user_code import (
    attributes_of,
    class_values,
    functions_of,
    global_names,
    is_users,
    is_users_file,
    slots,
    unwrap_step,
)
from optimizations.torch_internals.autograd_graph import global_hooks, tensor_hooks

DEPTH = 3
"""Most containers and objects between a root and a compared number."""
LONG = 1000
"""A container with more members is data and not settings: the walk does not descend into it."""
_PLAIN_OBJECTS = (types.SimpleNamespace, argparse.Namespace)
_STATEFUL = (
    *("torch.amp.grad_scaler", "torch.cuda.amp", "torch.optim.lr_scheduler", "torch.optim.swa_utils"),
    "torch.distributions.",
)
"""Modules of PyTorch whose objects have state of a training loop."""
_OPAQUE = frozenset(sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy", "optimizations", "triton"}
"""Packages whose objects have no state that a training loop sets."""
_COUNT_CALLS = ("torch.nn.parallel",)
"""Modules of PyTorch that change their own state in every call."""
_SETTINGS_OF_THESE = ("training", "require_backward_grad_sync")
"""Their settings that are compared. `no_sync()` sets the latter, which disables the exchange of gradients."""


def reach(roots: Iterable[tuple[str, Any]], *, hooks_of_tensors: bool = True) -> HostState:
    """Return everything reachable from `roots`, (path, object) pairs. Note [What is reached].

    `hooks_of_tensors`: hooks of parameters are followed, for code that runs a backward.
    """
    hooks = [("hook", hook) for held in global_hooks() for hook in held.values()]
    return _Walk(hooks_of_tensors).run([*roots, *hooks])


def of_argument(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield roots for `reach`: the objects in an argument, and the program's own classes of its containers."""
    for where, one, is_leaf in parts(value, name):
        if not is_leaf and is_users(type(one).__module__):
            yield where, type(one)
        elif is_leaf and type(one) not in PLAIN and not isinstance(one, torch.Tensor):
            yield where, one


_Member = tuple[str, Any, int]
"""A path, the value, and its distance from a root."""


class _Walk:
    def __init__(self, hooks_of_tensors: bool) -> None:
        self.state = HostState()
        self._hooks_of_tensors = hooks_of_tensors
        self._seen: dict[int, tuple[Any, int]] = {}
        self._noted: set[tuple[int, bool]] = set()
        self._scopes: dict[int, set[str]] = {}
        self._same_names: dict[str, int] = {}
        self._first_module: str | None = None

    def run(self, roots: Iterable[tuple[str, Any]]) -> HostState:
        waiting: collections.deque[_Member] = collections.deque((path, value, 0) for path, value in roots)
        while waiting:
            path, value, depth = waiting.popleft()
            if type(value) in PLAIN:
                continue
            value = unwrap_step(value)
            if _is_root(value):
                depth = 0
            # An object may be found again nearer to a root, so that the walk descends further.
            known = self._seen.get(id(value))
            if known is not None and known[1] <= depth:
                continue
            self._seen[id(value)] = value, depth
            waiting.extend(self._members(path, value, depth))
        return self.state

    def _add(self, found: dict[str, Any], path: str, value: Any) -> str:
        """Store a value by its path, with a number if that is taken, as by a variable of another function."""
        if path in found:
            self._same_names[path] = number = self._same_names.get(path, 1) + 1
            path = f"{path} ({number})"
        found[path] = value
        return path

    def _hold(
        self, held: Any, path: str, depth: int, *, but: Callable[[Any], bool] = lambda name: False, **settings: Any
    ) -> Iterator[_Member]:
        """Add a container to the state, once, and return its members, which have this `depth`.

        `but`: whether the walk does not follow an attribute of this name.
        """
        container = Container(held, path, is_compared=depth <= DEPTH, **settings)
        self._seen.setdefault(id(held), (held, depth))
        key = id(held), container.names is None
        if not (key in self._noted or isinstance(held, (tuple, frozenset))):
            self._noted.add(key)
            self.state.containers.append(container)

        def members() -> Iterator[_Member]:  # the content of a long container is not read
            for key, member in container.content().items():
                if not but(key) and (depth <= DEPTH or isinstance(member, torch.Tensor) or _is_root(member)):
                    yield container.name_of(key), member, depth

        return members()

    def _members(self, path: str, value: Any, depth: int) -> Iterator[_Member]:
        """Add a value to the state, and yield its members."""
        state = self.state
        if isinstance(value, torch.Tensor):
            yield from self._of_tensor(path, value)
        elif isinstance(value, torch.nn.Module):
            yield from self._of_module(path, value)
        elif isinstance(value, torch.optim.Optimizer):
            yield from self._of_optimizer(path, value)
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(path, value)
        elif isinstance(value, types.MethodType):
            owner = path.rsplit(".", 1)[0] if "." in path else type(value.__self__).__name__
            yield owner, value.__self__, 0
            yield path, value.__func__, 0
        elif isinstance(value, functools.partial):
            yield f"{path}.func", value.func, depth
            yield from ((f"{path}.args[{index}]", member, depth) for index, member in enumerate(value.args))
            yield from ((f"{path}.{name}", member, depth) for name, member in value.keywords.items())
        elif isinstance(value, types.CellType):
            yield from self._hold(value, path, depth, names={CELL})
        elif isinstance(value, (dict, list, tuple, set, frozenset, collections.deque)):
            found = self._hold(value, path, depth + 1)
            if is_users(type(value).__module__):
                yield from self._of_object(path, value, depth)
            if len(value) <= LONG:
                yield from found
        elif isinstance(value, Iterator) or _draws(value):
            state.iterators.append(path)
            if isinstance(value, StaticLoader):
                state.static_loaders.add(path)
                lent = [tensor for batch in value.lent for tensor in batch.buffers]
                yield from ((f"{path}.buffers[{index}]", tensor, depth) for index, tensor in enumerate(lent))
        elif isinstance(value, type):
            if is_users(value.__module__):
                yield from self._of_class(path, value, depth)
        elif not isinstance(value, types.ModuleType):  # `_of_globals` follows the names that code uses of a module
            yield from self._of_object(path, value, depth)

    def _of_tensor(self, path: str, value: torch.Tensor) -> Iterator[_Member]:
        path = self._add(self.state.tensors, path, value)
        if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # attributes are its inner tensors
            yield from self._hold(vars(value), path, 0, is_attributes=True, always_read=True)
        for held in tensor_hooks(value) if self._hooks_of_tensors else ():
            yield from ((f"{path}.hook", hook, 0) for hook in list(held.values()))

    def _of_object(self, path: str, value: Any, depth: int) -> Iterator[_Member]:
        kind = type(value)
        users, stateful = is_users(kind.__module__), str(kind.__module__).startswith(_STATEFUL)
        opaque = str(kind.__module__).split(".")[0] in _OPAQUE and not stateful
        if opaque and not isinstance(value, _PLAIN_OBJECTS):
            return
        if names := slots(kind):
            yield from self._hold(value, path, depth + 1, names=names, is_attributes=True, of_library=not users)
        if (attributes := attributes_of(value)) is not None:
            yield from self._hold(attributes, path, depth + 1, is_attributes=True, of_library=not users)
        if users:
            yield kind.__qualname__, kind, depth

    def _of_class(self, path: str, kind: type, depth: int) -> Iterator[_Member]:
        if names := class_values(kind):
            yield from self._hold(kind, path, depth + 1, names=names, is_attributes=True)
        yield from ((f"{path}.{one.__name__}", one, 0) for one in functions_of(kind))

    def _of_function(self, path: str, function: types.FunctionType) -> Iterator[_Member]:
        original = getattr(function, "_torchdynamo_orig_callable", None)
        if original is not None:
            self.state.compiled = True
            if (code := getattr(original, "__code__", None)) is not None:
                self.state.compiled_code.append(code)
            yield path, original, 0
            return
        code, scope = function.__code__, function.__globals__
        yield from ((name, cell, 0) for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False))
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            yield path, wrapped, 0
        if not is_users_file(code.co_filename):
            return
        self.state.code.append(code)
        if function.__kwdefaults__:
            yield from self._hold(function.__kwdefaults__, path, 0, is_attributes=True)
        if vars(function):
            yield from self._hold(vars(function), path, 1, is_attributes=True)
        defaults = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) :]
        yield from ((name, member, 0) for name, member in zip(names, defaults, strict=False))
        module = str(scope.get("__name__"))
        self._first_module = self._first_module or module
        yield from self._of_globals("" if module == self._first_module else module, scope, global_names(code))

    def _of_globals(self, path: str, scope: dict[str, Any], names: frozenset[str]) -> Iterator[_Member]:
        """Yield the globals that code names, also in the program's own modules among them."""
        if (found := self._scopes.get(id(scope))) is None:
            found = self._scopes[id(scope)] = set()
            self.state.containers.append(Container(scope, path, found, is_attributes=True))
        new = sorted((names & scope.keys()) - found)
        found.update(new)
        yield from ((f"{path}.{name}" if path else name, scope[name], 0) for name in new)
        for name in sorted(names):
            member = scope.get(name)
            if isinstance(member, types.ModuleType) and is_users(member.__name__) and vars(member) is not scope:
                yield from self._of_globals(member.__name__, vars(member), names - frozenset(found))

    def _of_module(self, path: str, module: torch.nn.Module) -> Iterator[_Member]:
        path = self._add(self.state.modules, path, module)
        kind, attributes = type(module), vars(module)
        users = is_users(kind.__module__)
        if "_orig_mod" in attributes.get("_modules", {}) or attributes.get("_compiled_call_impl") is not None:
            self.state.compiled = True
        if str(kind.__module__).startswith(_COUNT_CALLS):
            self._hold(module, path, 1, names=set(_SETTINGS_OF_THESE), is_attributes=True)
        else:
            skipped = lambda name: name in KEPT_BY_MODULES or is_own(name)  # noqa: E731
            yield from self._hold(attributes, path, 1, but=skipped, is_attributes=True, of_library=not users)
        for name in KEPT_BY_MODULES:
            if isinstance(held := attributes.get(name), dict):  # TorchScript's are not, and are refused
                yield from self._hold(held, path, 0, is_attributes=True, always_read=True)
        for name in MODULE_HOOKS:
            yield from ((f"{path}.{name}", hook, 0) for hook in list((attributes.get(name) or {}).values()))
        if users:
            yield kind.__qualname__, kind, 0

    def _of_optimizer(self, path: str, optimizer: torch.optim.Optimizer) -> Iterator[_Member]:
        path = self._add(self.state.optimizers, path, optimizer)
        kind, attributes = type(optimizer), vars(optimizer)
        settings = {"is_attributes": True, "always_read": True, "of_library": not is_users(kind.__module__)}
        yield from self._hold(attributes, path, 1, but=lambda name: name == "state" or is_own(name), **settings)
        # Held as well: a program may empty it, and a capture that fails may have added states that were never computed.
        self._hold(optimizer.state, f"{path}.state", 0, always_read=True, of_library=True)
        for index, (parameter, kept) in enumerate(optimizer.state.items()):
            if isinstance(kept, dict):
                yield from self._hold(kept, f"{path}.state[{index}]", 0, always_read=True, of_library=True)
            yield f"{path}.parameters[{index}]", parameter, 0
        for name in OPTIMIZER_HOOKS:
            yield from ((f"{path}.{name}", hook, 0) for hook in list(attributes.get(name, {}).values()))
        if is_users(kind.__module__):
            yield kind.__qualname__, kind, 0


def _is_root(value: Any) -> bool:
    roots = (torch.nn.Module, torch.optim.Optimizer, types.FunctionType, types.MethodType)
    return isinstance(value, roots) or str(type(value).__module__).startswith(_STATEFUL)


_OWN = frozenset(
    {
        *("_is_full_backward_hook", "_compiled_call_impl", "_non_persistent_buffers_set"),
        *("_step_supports_amp_scaling", "_zero_grad_profile_name", "__builtins__"),
    }
)


def is_own(name: str) -> bool:
    """Return whether an attribute of this name is internal to PyTorch."""
    return name in _OWN or "_hooks" in name or name.startswith("_warned")


def _draws(value: Any) -> bool:
    """Return whether an object draws random numbers."""
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *of_numpy)) and not isinstance(value, random.SystemRandom)
