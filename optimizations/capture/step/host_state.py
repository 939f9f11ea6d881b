"""Represent the Python state that a step reaches: containers, and the tensors, modules and optimizers in them.

A graph repeats the work of the GPU and runs no Python. So a call that changes Python state is refused. State that the
program changes between calls is compared before each replay. State that a failed capture changed is restored, and the
call then runs from its beginning.
"""

from __future__ import annotations

import argparse
import collections
import functools
import operator
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from optimizations.capture.signature import PLAIN, exact, parts
from optimizations.capture.static_loader import StaticLoader
from optimizations.capture.step.user_code import (
    BINDS,
    GROWS,
    STEPS,
    attributes_of,
    class_values,
    functions_of,
    global_names,
    is_users,
    is_users_file,
    line_with,
    slots,
    unwrap_step,
)
from optimizations.report.steps import Refusal
from optimizations.torch_internals.autograd_graph import global_hooks, hooks_registered, tensor_hooks

_ABSENT = object()
CELL = "cell_contents"
"""The only name of a closure cell."""
KEPT_BY_MODULES = ("_parameters", "_buffers", "_modules")
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps its hooks."""
OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Where an optimizer keeps its hooks."""
Content = dict[Any, Any]
"""Keys and values of a container. The keys of a list are its indices, those of a set the ids of its members."""


@dataclass(slots=True)
class Container:
    """Describe a holder of values: a dict (also that of an object's attributes), list, set or queue, or named values.

    Attributes:
        names: if given, `held` is an object, a class or a closure cell with these attributes, or a dict with these
            entries, such as the globals of a module.
        is_attributes: its keys are attributes or variables, so names have no brackets.
        always_read: it belongs to a module or optimizer, whose tensors compiled code reads without an operator.
        of_library: its owner is library code, which may read any entry by its name.
        is_compared: its numbers are compared between calls. If not, only changes during a call are checked.
    """

    held: Any
    path: str
    names: set[str] | None = None
    is_attributes: bool = False
    always_read: bool = False
    of_library: bool = False
    is_compared: bool = True

    @property
    def is_sequence(self) -> bool:
        return self.names is None and isinstance(self.held, (list, set, collections.deque))

    @property
    def has_attributes(self) -> bool:
        """Return whether its values are attributes of `held` itself, and not entries."""
        return self.names is not None and type(self.held) is not dict

    def name_of(self, key: Any) -> str:
        """Return the expression by which a program refers to an entry."""
        if isinstance(self.held, types.CellType):
            return self.path
        if self.is_attributes:
            return f"{self.path}.{key_name(key)}" if self.path else key_name(key)
        is_key = isinstance(key, PLAIN) and not isinstance(self.held, (set, frozenset))
        return f"{self.path}[{key!r}]" if is_key else f"{self.path}[...]"

    def content(self) -> Content:
        """Return a shallow copy."""
        if self.names is None:
            return content_of(self.held)
        found = ((name, self._named(name)) for name in sorted(self.names))
        return {name: value for name, value in found if value is not _ABSENT}

    def _named(self, name: str) -> Any:
        if not self.has_attributes:
            return self.held.get(name, _ABSENT)
        try:
            return getattr(self.held, name)
        except (AttributeError, ValueError):  # the second by an empty cell
            return _ABSENT

    def get(self, key: Any) -> Any:
        """Return the value of an entry; None if it no longer exists."""
        held = self.held
        if self.has_attributes:
            return None if (found := self._named(key)) is _ABSENT else found
        if isinstance(held, dict):
            return dict.get(held, key)
        return held[key] if key < len(held) else None

    def put(self, key: Any, value: Any) -> None:
        """Set the value of an entry. An attribute of a class is that of the base class that defines it."""
        held = self.held
        if not self.has_attributes:
            held[key] = value
        elif isinstance(held, type):
            type.__setattr__(next((one for one in held.__mro__ if key in vars(one)), held), key, value)
        else:
            object.__setattr__(held, key, value)

    def restore(self, content: Content) -> None:
        """Restore the entries from a shallow copy, in place."""
        held = self.held
        if self.names is not None:
            now = self.content()
            for key, value in content.items():
                if now.pop(key, _ABSENT) is not value:
                    self.put(key, value)
            for key in now:
                object.__delattr__(held, key) if self.has_attributes else held.pop(key)
            return
        held.clear()
        if isinstance(held, (list, collections.deque)):
            held.extend(content.values())
        else:
            held.update(content if isinstance(held, dict) else content.values())


def changes_state(words: str, advice: str, line: str | None) -> Refusal:
    """Return the refusal of a call that changes Python state."""
    return Refusal(f"changes Python's state, and a graph runs no Python: {words}", advice, line)


_BOUND_TO_A_TENSOR = (
    "write into it in place (`total += value`, `total.copy_(value)`), or return the tensor and keep it after the step"
)
_GREW = "return the tensor, and keep it after the step: `losses.append(step(batch))`"
_OTHER = (
    "do it outside of the step, as `train()`, `eval()` and `scheduler.step()`, or keep the number in a tensor on the "
    "GPU that is written in place (`count += 1`), as PyTorch's optimizers do with capturable=True or fused=True"
)


@dataclass(slots=True)
class HostState:
    """Store everything that a step reaches.

    Attributes:
        tensors, modules, optimizers: by path.
        iterators: objects that each read changes, by path: iterators, and generators of random numbers.
        code: code objects of the program's own functions that the step reaches.
        compiled: whether a module or function is compiled. `compiled_code` has the code objects of such functions.
    """

    containers: list[Container] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    iterators: dict[str, Any] = field(default_factory=dict)
    code: list[types.CodeType] = field(default_factory=list)
    compiled_code: list[types.CodeType] = field(default_factory=list)
    compiled: bool = False

    def parameters(self) -> list[torch.Tensor]:
        """Return each leaf that accumulates gradients, or did so before it was frozen, once."""
        leaves = (one for one in self.tensors.values() if one.is_leaf)
        found = {id(one): one for one in leaves if one.requires_grad or isinstance(one, torch.nn.Parameter)}
        return list(found.values())

    def snapshot(self) -> list[Content]:
        """Return shallow copies of all containers."""
        return [container.content() for container in self.containers]

    def changes(self, before: list[Content]) -> Iterator[Refusal]:
        """Yield a refusal for each difference from `before`, with the program's names.

        A container that was replaced is compared with its replacement.
        """
        contents = {id(container.held): old for container, old in zip(self.containers, before, strict=True)}
        replaced: set[int] = set()
        for container, old in zip(self.containers, before, strict=True):
            if id(container.held) in replaced:
                continue
            new, path = container.content(), container.path
            if container.is_sequence and len(old) != len(new):
                words = f"{path} has {len(new)} members instead of {len(old)}"
                yield changes_state(words, _GREW, line_with(self.code, path, GROWS))
                continue
            for key in dict.fromkeys([*old, *new]):
                was, now = old.get(key, _ABSENT), new.get(key, _ABSENT)
                # An optimizer adds a state at a parameter's first step only.
                if was is now or (was is _ABSENT and container.always_read and isinstance(key, torch.Tensor)):
                    continue
                replaced.add(id(was))
                if not is_unchanged(was, now, contents):
                    yield self._change(container, key, was, now)

    def _change(self, container: Container, key: Any, was: Any, now: Any) -> Refusal:
        path = container.name_of(key)
        name = container.path if container.is_sequence or isinstance(container.held, types.CellType) else key_name(key)
        of_tensors = isinstance(now, (tuple, list)) and any(isinstance(member, torch.Tensor) for member in now)
        advice = _BOUND_TO_A_TENSOR if isinstance(now, torch.Tensor) or of_tensors else _OTHER
        if isinstance(now, torch.Tensor):
            words = f"{path} is bound to another tensor"
        elif of_tensors:
            words = f"{path} is bound to another {type(now).__name__} of tensors"
        elif isinstance(was, PLAIN) and isinstance(now, PLAIN):
            words = f"{path} changes from {was!r} to {now!r}"
        else:
            words = f"{path} {'is deleted' if now is _ABSENT else 'is set to None' if now is None else 'changes'}"
        # Code of a library may bind it, such as that of a scheduler.
        line = line_with(self.code, name, BINDS) or line_with(self.code, path.rpartition(".")[0], STEPS)
        return changes_state(words, advice, line)

    def restore(self, before: list[Content]) -> None:
        """Restore all containers that changed since `before`."""
        for container, old in zip(self.containers, before, strict=True):
            new = container.content()
            if [*map(id, old)] != [*map(id, new)] or any(old[key] is not new[key] for key in old):
                container.restore(old)


def content_of(held: Any) -> Content:
    """Return a shallow copy of a dict, set, list, tuple or queue."""
    if isinstance(held, dict):
        return dict(held)
    return {id(member): member for member in held} if isinstance(held, (set, frozenset)) else dict(enumerate(held))


def is_unchanged(old: Any, new: Any, contents: Mapping[int, Content], depth: int = 4) -> bool:
    """Return whether a value is the same object, or was replaced by an equal number or container of numbers.

    `contents`: earlier contents of containers, by the id of the container.
    """
    if old is new:
        return True
    if isinstance(old, torch.Tensor) or type(old) is not type(new):
        return False
    if isinstance(old, PLAIN):
        return exact(old) == exact(new)
    if not depth or not isinstance(old, (dict, list, tuple, set, frozenset)):
        return False
    then, now = contents.get(id(old)), content_of(new)
    then = content_of(old) if then is None else then
    return then.keys() == now.keys() and all(is_unchanged(then[key], now[key], contents, depth - 1) for key in then)


def key_name(key: Any) -> str:
    """Return a key as text. Values of a tensor are left out: printing them would read them from the GPU."""
    return key if isinstance(key, str) else repr(key) if isinstance(key, PLAIN) else "..."


def hooks_of(tensors: Iterable[torch.Tensor], attributes: Iterable[dict[str, Any]]) -> list[dict[int, Any]]:
    """Return the dicts of hooks: global ones, those of these tensors, and those in `vars` of modules and optimizers."""
    of_tensors = [held for tensor in tensors for held in tensor_hooks(tensor)]
    names = (*MODULE_HOOKS, *OPTIMIZER_HOOKS)
    of_owners = [held for own in attributes for name in names if (held := own.get(name)) is not None]
    return [*global_hooks(), *of_tensors, *of_owners]


class Hooks:
    """Detect changes of the registered hooks of parameters, modules and optimizers.

    PyTorch numbers registrations, so the latest number is compared first. A removal does not change that number, so the
    sizes of the dicts that had hooks are compared too. All dicts are read only if one of these differs.

    `tensors` are those whose gradients a step computes, `owners` modules and optimizers. Owners are not referenced: a
    module that was passed as an argument may be freed.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], owners: Iterable[Any] = ()) -> None:
        self._tensors, self._attributes = list(tensors), [vars(owner) for owner in owners]
        self._hooks, self._compared = self._read()

    def _read(self) -> tuple[list[Callable[..., Any]], tuple[int, list[dict[int, Any]], list[int]]]:
        """Return the hooks, and what is compared first: the latest number, the dicts with hooks, and their sizes."""
        registered = hooks_registered()
        filled = [held for held in hooks_of(self._tensors, self._attributes) if held]
        return [hook for held in filled for hook in held.values()], (registered, filled, list(map(len, filled)))

    def unchanged(self) -> bool:
        """Return whether exactly the same hooks are registered."""
        registered, filled, sizes = self._compared
        if hooks_registered() == registered and (not filled or list(map(len, filled)) == sizes):
            return True
        hooks, compared = self._read()
        if len(hooks) != len(self._hooks) or not all(map(operator.is_, hooks, self._hooks)):
            return False
        self._compared = compared
        return True


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
            state.iterators[path] = value
            if isinstance(value, StaticLoader):
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
