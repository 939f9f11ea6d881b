"""Represent the Python state that a step reaches: containers, and the tensors, modules and optimizers in them.

A graph repeats the work of the GPU and runs no Python. So a call that changes Python state is refused. State that the
program changes between calls is compared before each replay. State that a failed capture changed is restored, and the
call then runs from its beginning.
"""

from __future__ import annotations

import collections
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from optimizations.capture.signature import PLAIN, exact
from optimizations.capture.step.source_lines import BINDS, GROWS, STEPS, line_with
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
    def is_cell(self) -> bool:
        return isinstance(self.held, types.CellType)

    @property
    def is_sequence(self) -> bool:
        return self.names is None and isinstance(self.held, (list, set, collections.deque))

    @property
    def has_attributes(self) -> bool:
        """Return whether its values are attributes of `held` itself, and not entries."""
        return self.names is not None and type(self.held) is not dict

    def name_of(self, key: Any) -> str:
        """Return the expression by which a program refers to an entry."""
        if self.is_cell:
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

    def restore(self, content: Content) -> None:
        """Restore the entries from a shallow copy, in place. A named one that was added stays."""
        held = self.held
        if self.names is not None:
            for key, value in content.items():
                if self.get(key) is not value:
                    setattr(held, key, value) if self.has_attributes else held.update({key: value})
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
        iterators: paths of objects that each read changes: iterators, and generators of random numbers.
        static_loaders: those of them that are static loaders.
        code: code objects of the program's own functions that the step reaches.
        compiled: whether a module or function is compiled. `compiled_code` has the code objects of such functions.
    """

    containers: list[Container] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    iterators: list[str] = field(default_factory=list)
    static_loaders: set[str] = field(default_factory=set)
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
        name = container.path if container.is_sequence or container.is_cell else key_name(key)
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
