"""Call one sample with inputs at new addresses and of new values, forward and backward."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from unittest import mock

import numpy
import torch
from torch.utils import _pytree as pytree

from .databases import Task, entries

CALLS = {"cuda": 16, "cpu": 6}
"""Calls of each sample, by device: after eight Encore may examine a graph's inputs; before the last it has replaced the
graph."""

SEEDS = 6
"""Calls with values of their own; later ones have the same again."""

MISALIGNED = (4, 11)
"""Calls whose tensors begin one element after the start of their memory."""

SEEN = 64
"""The samples of an entry are drawn from its first so many."""

PER_ENTRY = 4
UNINITIALIZED = ("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted")
"""Operators whose values mean nothing."""


class Session(Protocol):
    """Compile a function, and note what its calls return."""

    device: str

    def compile(self, target: Any) -> Any: ...

    def begin(self, call: int) -> None: ...

    def note(self, *values: Any) -> None: ...


class NoSample(Exception):
    """The entry has fewer samples, or none that can be used like this."""


Case = Callable[[Session], None]


def case(task: Task, device: str, misaligned: Sequence[int] = MISALIGNED) -> Case:
    """Return the program of a sample, with calls whose inputs are misaligned. Raises NoSample."""
    entry = entries(task.database)[task.name]
    if task.database == "module_db":
        return _module_case(entry, task, device, misaligned)
    if task.database == "optim_db":
        return _optimizer_case(entry, task, device)
    if task.variant == "opcheck":
        return _opcheck_case(entry, task, device)
    return _operator_case(entry, task, device, misaligned)


def _operator_case(entry: Any, task: Task, device: str, misaligned: Sequence[int]) -> Case:
    dtype = getattr(torch, task.dtype)
    differentiable = dtype in entry.supported_backward_dtypes(torch.device(device).type) and entry.supports_autograd
    gradients = task.variant == "function" and differentiable

    def drawn() -> Iterator[Any]:
        return iter(entry.sample_inputs(device, dtype, requires_grad=gradients))

    place = _place(task, drawn)
    samples = [_nth(drawn, seed, place) for seed in range(min(CALLS[device], SEEDS))]
    first = samples[0]
    if task.variant == "inplace" and first.broadcasts_input:
        raise NoSample("the result is larger than the input")
    nests = _alike([(one.input, tuple(one.args), dict(one.kwargs)) for one in samples], CALLS[device])
    function = entry.get_inplace() if task.variant == "inplace" else entry.op
    finish = first.output_process_fn_grad if gradients else _as_it_is
    uninitialized = entry.name in UNINITIALIZED

    def run(session: Session) -> None:
        def program(*arguments: Any, **keywords: Any) -> Any:
            return function(*arguments, **keywords)

        compiled = session.compile(program)
        kept = []
        for number, nest in enumerate(nests):
            value, arguments, keywords = copied(nest, shifted=number in misaligned)
            if task.variant == "out":
                keywords["out"] = _room(function, nest, number)
            session.begin(number)
            found = compiled(value, *arguments, **keywords)
            if uninitialized:
                found = pytree.tree_map_only(torch.Tensor, lambda one: (one.dtype, tuple(one.shape)), found)
            session.note(found, value, arguments, keywords)
            if gradients:
                session.note(_gradients(finish(found), (value, arguments, keywords), number))
            kept.append((value, arguments, keywords))  # no later call gets these addresses

    return run


def _module_case(info: Any, task: Task, device: str, misaligned: Sequence[int]) -> Case:
    dtype = getattr(torch, task.dtype)

    def drawn() -> Iterator[Any]:
        return iter(info.module_inputs_func(info, device, dtype, requires_grad=True, training=True))

    place = _place(task, drawn)
    samples = [_nth(drawn, seed, place) for seed in range(min(CALLS[device], SEEDS))]
    if samples[0].forward_input is None:
        raise NoSample("nothing is passed to the module")
    made = samples[0].constructor_input
    nests = [(None, tuple(one.forward_input.args), dict(one.forward_input.kwargs)) for one in samples]
    nests = _alike(nests, CALLS[device])

    def run(session: Session) -> None:
        seed_all(0)
        module = info.module_cls(*made.args, **made.kwargs).to(device=device, dtype=dtype)
        compiled = session.compile(module)
        kept = []
        for number, nest in enumerate(nests):
            _, arguments, keywords = copied(nest, shifted=number in misaligned)
            session.begin(number)
            found = compiled(*arguments, **keywords)
            session.note(found, arguments, keywords, list(module.buffers()))
            leaves = (list(module.parameters()), arguments, keywords)
            session.note(_gradients(found, leaves, number))
            kept.append((arguments, keywords))

    return run


def _optimizer_case(info: Any, task: Task, device: str) -> Case:
    def drawn() -> Iterator[Any]:
        return iter(info.optim_inputs_func(device=device))

    given = _nth(drawn, 0, _place(task, drawn))
    settings = dict(given.kwargs)
    if info.optim_cls.__name__ in ("SparseAdam", "LBFGS"):
        raise NoSample("it needs sparse gradients or a closure")

    def run(session: Session) -> None:
        seed_all(0)
        sizes = ((4, 5), (2, 3)) if info.optim_cls.__name__ == "Muon" else ((4, 5), (7,), (3, 2, 2))
        parameters = [torch.randn(size, device=device, requires_grad=True) for size in sizes]
        optimizer = info.optim_cls(parameters, **{name: copied(value) for name, value in settings.items()})
        step = session.compile(optimizer.step)
        kept = []
        for number in range(CALLS[device]):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
                kept.append(parameter.grad)
            session.begin(number)
            step()
            state = [value for one in parameters for value in optimizer.state[one].values()]
            # A compiled step has its count of steps on the GPU, as `capturable` would have it.
            session.note(parameters, [value.cpu() if torch.is_tensor(value) else value for value in state])

    return run


def _opcheck_case(entry: Any, task: Task, device: str) -> Case:
    """Return the checks of `torch.library.opcheck`, whose comparison under AOTAutograd compiles with the session."""
    from torch.testing._internal.optests import aot_autograd

    seed_all(0)
    drawn = entry.sample_inputs(device, getattr(torch, task.dtype), requires_grad=entry.supports_autograd)
    samples = list(itertools.islice(drawn, PER_ENTRY))

    def run(session: Session) -> None:
        for number, sample in enumerate(samples):
            session.begin(number)
            with mock.patch.object(aot_autograd, "compiled_function") as compiles:
                compiles.side_effect = lambda function, *_, **__: session.compile(function)
                session.note(torch.library.opcheck(entry.op, (sample.input, *sample.args), sample.kwargs))
            assert compiles.called, "this PyTorch's opcheck compiles otherwise"

    return run


def seed_all(seed: int) -> None:
    """Seed every generator that samples are drawn from."""
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)


def _place(task: Task, drawn: Callable[[], Iterator[Any]]) -> int:
    seed_all(0)
    count = sum(1 for _ in itertools.islice(drawn(), SEEN))
    places = random.Random(task.name).sample(range(count), min(count, PER_ENTRY))
    if task.number >= len(places):
        raise NoSample(f"there are {len(places)} samples")
    return places[task.number]


def _nth(drawn: Callable[[], Iterator[Any]], seed: int, place: int) -> Any:
    seed_all(seed)
    found = next(itertools.islice(drawn(), place, None), None)
    if found is None:
        raise NoSample("samples depend on the seed")
    return found


def _alike(nests: list[Any], calls: int) -> list[Any]:
    """Return a nest for each call: the first one in place of those whose tensors differ in more than their values.

    Everything else of a nest, such as numbers and flags, is the first one's, so that nothing is compiled again.
    """
    leaves, structure = pytree.tree_flatten(nests[0])
    if any(torch.is_tensor(leaf) and leaf.layout is not torch.strided for leaf in leaves):
        raise NoSample("it has sparse inputs")
    alike = [nests[0]]
    for nest in nests[1:]:
        others, its = pytree.tree_flatten(nest)
        if its == structure and list(map(_geometry, leaves)) == list(map(_geometry, others)):
            pairs = zip(leaves, others, strict=True)
            nest = pytree.tree_unflatten([other if torch.is_tensor(one) else one for one, other in pairs], structure)
        else:
            nest = nests[0]
        alike.append(nest)
    return [alike[call % len(alike)] for call in range(calls)]


def _geometry(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value)
    return value.dtype, value.device, tuple(value.shape), value.stride(), value.requires_grad


def copied(nest: Any, *, shifted: bool = False) -> Any:
    """Return the nest with tensors in memory of their own that lie there as the originals do in theirs.

    `shifted`: all tensors of a memory lie one element further.
    """
    storages: dict[int, tuple[Any, int]] = {}
    tensors: dict[int, torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in tensors:
            tensors[id(value)] = _copied(value, storages, shifted)
        return tensors[id(value)]

    return pytree.tree_map(copy, nest)


def _copied(value: torch.Tensor, storages: dict[int, tuple[Any, int]], shifted: bool) -> torch.Tensor:
    with torch.no_grad():
        if value.is_conj() or value.is_neg() or value.is_quantized or value._is_zerotensor():
            made = value.detach().clone()
        else:
            storage = value.untyped_storage()
            if storage._cdata not in storages:
                storages[storage._cdata] = _memory(storage, value.itemsize if shifted else 0)
            mine, shift = storages[storage._cdata]
            made = torch.empty(0, dtype=value.dtype, device=value.device)
            made.set_(mine, value.storage_offset() + shift // value.itemsize, value.shape, value.stride())
    return made.requires_grad_(value.requires_grad)


def _memory(storage: Any, shift: int) -> tuple[Any, int]:
    """Return a copy of the memory after so many bytes."""
    memory = torch.zeros(storage.nbytes() + shift, dtype=torch.uint8, device=storage.device)
    memory[shift:] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return memory.untyped_storage(), shift


def _room(function: Any, nest: Any, number: int) -> Any:
    """Return tensors for `out=`, of the shapes that the results have."""
    value, arguments, keywords = copied(nest)
    seed_all(number)
    with torch.no_grad():
        found = function(value, *arguments, **keywords)
    room = pytree.tree_map_only(torch.Tensor, lambda one: torch.empty_like(one).fill_(number % 2), found)
    return tuple(room) if isinstance(found, tuple) else room


def _gradients(found: Any, given: Any, number: int) -> list[torch.Tensor | None]:
    """Return gradients of the differentiable results by the inputs, of a direction that depends on the call."""
    outputs = [one for one in pytree.tree_leaves(found) if isinstance(one, torch.Tensor) and one.requires_grad]
    inputs = [one for one in pytree.tree_leaves(given) if isinstance(one, torch.Tensor) and one.requires_grad]
    outputs = [one for one in outputs if one.grad_fn is not None]
    if not outputs or not inputs:
        return []
    directions = [_direction(one, number) for one in outputs]
    return list(torch.autograd.grad(outputs, inputs, directions, allow_unused=True))


def _direction(output: torch.Tensor, number: int) -> torch.Tensor:
    steps = torch.linspace(0.5, 1.5 + number, output.numel(), device=output.device, dtype=torch.float32)
    return steps.reshape(output.shape).to(output.dtype)


def _as_it_is(value: Any) -> Any:
    return value
