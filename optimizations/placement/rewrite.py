"""FX surgery: turns a plan into a graph whose CPU values are inputs on the GPU, and a description of these inputs.

The user's graph stays as it is: Dynamo generates its calling code from it after the backend is done. Nothing is
allocated here; the inputs come to life in `feeds`, at the first call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from optimizations import torch_internals
from optimizations.placement.evaluations import evaluation, inputs_of
from optimizations.placement.feed_plan import (
    Attribute,
    Evaluation,
    FeedPlan,
    HoistedGroup,
    Source,
    Staged,
    TensorLayout,
)
from optimizations.placement.fx_editing import attribute, copy_of, retarget, returned
from optimizations.placement.observe import CannotObserve, Observation, TensorFacts, observe
from optimizations.placement.plan import Hoist, PlacementPlan

ADDED = "encore_"
HOISTED = f"{ADDED}hoisted"
STAGED = f"{ADDED}staged"
PASSED = f"{ADDED}passed"


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The new graph, and how its arguments and results come from and go to the original's."""

    graph_module: torch.fx.GraphModule
    feeds: FeedPlan


class RewriteFailed(RuntimeError):
    """The rewritten graph is not the original's twin on the GPU; `node` is where this shows."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"{node}: {reason}")
        self.node = node
        self.reason = reason


def rewrite(
    graph_module: torch.fx.GraphModule,
    plan: PlacementPlan,
    observation: Observation,
    inputs: Sequence[Any],
) -> Rewritten:
    """The graph after `plan`, checked against the original's `observation` node by node.

    `inputs` are the ones that `observation` was made on.

    Raises:
        RewriteFailed: a node of the rewritten graph differs in shape, strides, dtype or device from what it should be,
            or would write to what later calls read.
    """
    surgery = _Surgery(graph_module, plan, observation, inputs)
    surgery.feed()
    surgery.move()
    surgery.give_out()
    surgery.sweep()
    after = surgery.check()
    if surgery.keep_copies(after):
        after = surgery.check()
    surgery.protect(after)
    surgery.note_values(after)
    return Rewritten(surgery.result, surgery.feed_plan())


class _Surgery:
    def __init__(
        self,
        graph_module: torch.fx.GraphModule,
        plan: PlacementPlan,
        observation: Observation,
        inputs: Sequence[Any],
    ) -> None:
        self.original = graph_module
        self.plan = plan
        self.before = observation
        self.device = torch.device(plan.device)
        self.result = copy_of(graph_module)
        self.graph = self.result.graph
        self.nodes = {
            original.name: copy for original, copy in zip(graph_module.graph.nodes, self.graph.nodes, strict=True)
        }
        renamed = [name for name, copy in self.nodes.items() if copy.name != name]
        if renamed:
            raise RewriteFailed(renamed[0], "its copy got another name")
        self.positions = {name: position for position, name in enumerate(self.nodes)}
        self.placeholders = [node.name for node in graph_module.graph.nodes if node.op == "placeholder"]
        self.inputs = dict(zip(self.placeholders, inputs, strict=True))
        self.hoisted = {name for hoist in plan.hoists for name in hoist.nodes}
        self.fed: list[torch.fx.Node] = []
        self.passed: list[str] = []
        self.rebuilt: dict[str, str] = {}
        self.last_added = self.nodes[self.placeholders[-1]] if self.placeholders else None
        self.outputs: list[torch.fx.Node | None] = []
        self.results: list[Source] = []
        self.after_inputs: tuple[Source, ...] = ()

    def feed(self) -> None:
        """Adds values on the GPU behind the inputs and lets the readers read them."""
        replacements: dict[str, torch.fx.Node] = {}
        kept = [value for group in _grouped(self.plan.hoists) for value in group]
        for position, value in enumerate(kept):
            replacements[value] = self._placeholder(f"{HOISTED}_{position}", self._layout(value), static=True)
        for position, value in enumerate(self.plan.stages):
            name = f"{STAGED}_{position}"
            replacements[value] = self._placeholder(name, self._layout(value), static=self.plan.keep_addresses)
        self.fed = list(replacements.values())
        for hoist in self.plan.hoists:
            if hoist.form == "literal":
                replacements[hoist.value] = self._literal(hoist)
            elif hoist.form == "rebuilt":
                replacements[hoist.value] = self._rebuilt(hoist)
                self.rebuilt[hoist.value] = replacements[hoist.value].name
        for reader, values in self.plan.fed.items():
            for value in values:
                if value in replacements:
                    self.nodes[reader].replace_input_with(self.nodes[value], replacements[value])

    def move(self) -> None:
        """Lets operations between GPU values run on the GPU. What made a copy there and back makes one still."""
        for name in self.plan.moves:
            node = self.nodes[name]
            retarget(node, self.device)
            facts = self.before.tensors[name]
            operands = [operand.name for operand in self.original_node(name).all_input_nodes]
            crosses = any(f.device == self.device for operand in operands for f in self.before.tensors[operand])
            if not crosses or len(facts) != 1 or self.before.effects[name].writes:
                continue
            with self.graph.inserting_after(node):
                clone = self.graph.call_method("clone", (node,))
            clone.meta = dict(node.meta)
            node.replace_all_uses_with(clone, delete_user_cb=lambda user, clone=clone: user is not clone)
            node.name, clone.name = f"{name}_there", name
            self.nodes[name] = clone

    def original_node(self, name: str) -> torch.fx.Node:
        return self._originals[name]

    @functools.cached_property
    def _originals(self) -> dict[str, torch.fx.Node]:
        return {node.name: node for node in self.original.graph.nodes}

    def give_out(self) -> None:
        """Lets the graph return what it computes itself, and says where each result of the original is found."""
        after, before = set(self.plan.after), set(self.plan.before)
        behind: list[str] = []
        ahead: list[str] = []
        self.after_names = inputs_of(self.original, after)
        self.before_results = ahead
        self.after_results = behind
        for value in returned(self.original):
            name = value.name if isinstance(value, torch.fx.Node) else None
            if name is None:
                self.results.append(Source("constant", 0, value))
            elif name in after:
                self.results.append(Source("after", _place_in(behind, name)))
            elif name in before:
                self.results.append(Source("before", _place_in(ahead, name)))
            else:
                self.results.append(Source("graph", self._output(self.nodes[name])))
        sources = []
        for name in self.after_names:
            if name in before:
                sources.append(Source("before", _place_in(ahead, name)))
            elif self._is_as_given(name):
                sources.append(Source("argument", self.placeholders.index(name)))
            else:
                sources.append(Source("graph", self._output(self._at_its_time(name))))
        self.after_inputs = tuple(sources)
        output = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        output.args = (tuple(self.outputs),)
        for name in reversed(self.plan.after):
            if not self.nodes[name].users:
                self.graph.erase_node(self.nodes.pop(name))
        left_over = [name for name in self.plan.after if name in self.nodes]
        if left_over:
            raise RewriteFailed(left_over[0], "is read in the graph as well as behind it")

    def _output(self, node: torch.fx.Node) -> int:
        return _place_in(self.outputs, node)

    def _is_as_given(self, name: str) -> bool:
        """Whether a value is an argument that the graph does not write on the GPU."""
        if name not in self.inputs or not isinstance(self.inputs[name], torch.Tensor):
            return name in self.inputs
        return self.before.tensors[name][0].device.type == "cpu" or not self._last_write(name)

    def _last_write(self, name: str) -> int:
        storages = {facts.storage for facts in self.before.tensors[name]}
        writers = (other for other, effects in self.before.effects.items() if not storages.isdisjoint(effects.writes))
        return max((self.positions[writer] for writer in writers), default=0)

    def _at_its_time(self, name: str) -> torch.fx.Node:
        """A value that is read behind the graph, as it is where the original graph reads it."""
        readers = [self.positions[user.name] for user in self.original_node(name).users if user.name in self.plan.after]
        if self._last_write(name) <= min(readers):
            return self.nodes[name]
        if len(readers) > 1:
            raise RewriteFailed(name, "is read behind the graph at several times, and written in between")
        (reader,) = (user.name for user in self.original_node(name).users if user.name in self.plan.after)
        with self.graph.inserting_before(self.nodes[reader]):
            clone = self.graph.call_method("clone", (self.nodes[name],))
        clone.meta = dict(self.nodes[name].meta)
        return clone

    def sweep(self) -> None:
        """Removes what is evaluated elsewhere, and CPU inputs that nobody reads any more."""
        needed = self._still_needed()
        for node in reversed(list(self.graph.nodes)):
            name = node.name
            if name in self.plan.before:
                if node.users and self.before.tensors[name]:
                    self._pass_on(node)
                if not node.users:
                    self.graph.erase_node(self.nodes.pop(name))
            elif name in self.hoisted and name not in needed:
                self.graph.erase_node(self.nodes.pop(name))
        fed_from = {*self.plan.stages, *(name for hoist in self.plan.hoists for name in hoist.attributes)}
        read_elsewhere = {*inputs_of(self.original, set(self.plan.before)), *self.after_names}
        for name in (fed_from | read_elsewhere) & set(self.placeholders):
            is_tensor = isinstance(self.inputs[name], torch.Tensor)
            if not self.nodes[name].users and is_tensor and self.before.tensors[name][0].device.type == "cpu":
                self.graph.erase_node(self.nodes.pop(name))
        self._check_passed_values_are_apart()
        self.graph.lint()
        self.result.recompile()

    def _check_passed_values_are_apart(self) -> None:
        """Arguments of the graph are compiled as memory apart from each other.

        So no two that share memory may be passed where the graph writes it.
        """
        present = {node.name for node in self.graph.nodes}
        written = {
            storage for name, effects in self.before.effects.items() if name in present for storage in effects.writes
        }
        given = [
            *self.passed,
            *(name for name in self.placeholders if name in present and self.before.tensors.get(name)),
        ]
        for name in self.passed:
            shared = self._storages(name) & written
            other = next((one for one in given if one != name and shared & self._storages(one)), None)
            if other is not None:
                raise RewriteFailed(name, f"shares memory with {other}, and the graph writes it")

    def _pass_on(self, node: torch.fx.Node) -> None:
        """Lets what stays in the graph read a value that is evaluated before it."""
        name = node.name
        if len(self.before.tensors[name]) != 1:
            # Its members are values of their own; what takes them apart can do so here as well.
            if any(not effects.writes.isdisjoint(self._storages(name)) for effects in self.before.effects.values()):
                raise RewriteFailed(name, "is evaluated before the graph and written in it")
            return
        layout = self._cpu_layout(name)
        passed = self._placeholder(
            f"{PASSED}_{len(self.passed)}", layout, static=False, device=self.before.tensors[name][0].device
        )
        self.passed.append(name)
        node.replace_all_uses_with(passed)

    def _storages(self, name: str) -> set[int]:
        return {facts.storage for facts in self.before.tensors[name]}

    def check(self) -> Observation:
        """Observes the rewritten graph and compares each node with its original."""
        added = {node.name: node.meta["example_value"] for node in self.graph.nodes if node.name.startswith(ADDED)}
        placeholders = [node.name for node in self.graph.nodes if node.op == "placeholder"]
        given = [added[name] if name in added else self.inputs[name] for name in placeholders]
        try:
            after = observe(self.result, given, mode=self.before.mode)
        except CannotObserve as error:
            raise RewriteFailed(error.node, str(error)) from error
        for name, facts in after.tensors.items():
            if name in self.before.tensors:
                device = self.device if name in self.plan.moves else None
                _compare(name, self.before.tensors[name], facts, device)
        for value, name in self.rebuilt.items():
            _compare(value, self.before.tensors[value], after.tensors[name], self.device)
        return after

    def keep_copies(self, after: Observation) -> bool:
        """Clones what used to be a copy to another device and now is an alias; says whether there was any."""
        candidates = [self.nodes[name] for name in self.plan.fed if name in self.plan.snapshots]
        aliases = [node for node in candidates if _new_alias(node, self.before, after)]
        for node in aliases:
            with self.graph.inserting_after(node):
                clone = self.graph.call_method("clone", (node,))
            clone.meta = dict(node.meta)
            node.replace_all_uses_with(clone, delete_user_cb=lambda user, clone=clone: user is not clone)
        if aliases:
            self.graph.lint()
            self.result.recompile()
        return bool(aliases)

    def protect(self, after: Observation) -> None:
        """Nobody may write to what is kept for later calls, and the caller may not get it."""
        kept = {facts.storage: node.name for node in self.fed for facts in after.tensors[node.name]}
        for name, effects in after.effects.items():
            if not effects.writes.isdisjoint(kept):
                raise RewriteFailed(name, "would write to a value that is kept for later calls")
        outputs = returned(self.result)
        for node in {outputs[source.index] for source in self.results if source.where == "graph"}:
            if isinstance(node, torch.fx.Node) and any(facts.storage in kept for facts in after.tensors[node.name]):
                raise RewriteFailed(node.name, "would give out a value that is kept for later calls")

    def note_values(self, after: Observation) -> None:
        """Gives changed nodes the value Dynamo would have noted, for passes and reports that read it."""
        for node in self.graph.nodes:
            facts = after.tensors.get(node.name)
            if facts and facts != self.before.tensors.get(node.name) and node.op != "placeholder":
                node.meta["example_value"] = after.values[node.name]

    def feed_plan(self) -> FeedPlan:
        hoists = {hoist.value: hoist for hoist in self.plan.hoists}
        groups = []
        for values in _grouped(self.plan.hoists):
            members = [hoists[value] for value in values]
            groups.append(
                HoistedGroup(
                    self._computation(members),
                    tuple(self._attribute(name) for name in members[0].attributes),
                    tuple(self._layout(value) for value in values),
                    tuple(value in self.plan.awaited for value in values),
                )
            )
        ahead = self.before_results
        staged = tuple(
            Staged(
                Source("argument", self.placeholders.index(value))
                if value in self.inputs
                else Source("before", _place_in(ahead, value)),
                self._layout(value),
                value in self.plan.awaited,
            )
            for value in self.plan.stages
        )
        passed = tuple(_place_in(ahead, name) for name in self.passed)
        present = {node.name for node in self.graph.nodes if node.op == "placeholder"}
        changed = bool(self.plan.after) or any(source.where != "graph" for source in self.results)
        in_order = [source.index for source in self.results] == list(range(len(self.results)))
        copied_out = {index for index, node in enumerate(self.outputs) if node is not None and self._is_moved(node)}
        return FeedPlan(
            device=self.device,
            kept=tuple(index for index, name in enumerate(self.placeholders) if name in present),
            hoisted=tuple(groups),
            staged=staged,
            keep_addresses=self.plan.keep_addresses,
            before=self._evaluation(self.plan.before, ahead),
            passed=passed,
            passed_layouts=tuple(self._cpu_layout(name) for name in self.passed),
            copied_out=tuple(sorted(copied_out)),
            after=self._evaluation_behind(),
            results=tuple(self.results) if changed or not in_order else None,
            apart=self._apart(),
        )

    def _is_moved(self, node: torch.fx.Node) -> bool:
        return node.name in self.plan.moves

    def _cpu_layout(self, name: str) -> TensorLayout:
        (facts,) = self.before.tensors[name]
        return TensorLayout(facts.shape, facts.stride, facts.dtype)

    def _evaluation(self, names: Sequence[str], results: Sequence[str]) -> Evaluation | None:
        if not names:
            return None
        inputs = inputs_of(self.original, set(names))
        compute = evaluation(self.original, set(names), inputs, results)
        return Evaluation(compute, tuple(Source("argument", self.placeholders.index(name)) for name in inputs))

    def _evaluation_behind(self) -> Evaluation | None:
        if not self.plan.after:
            return None
        # Gradients are switched on and off there as in the original graph.
        switches = {node.name for node in self.original.graph.nodes if node.target is torch_internals.set_grad_enabled}
        wanted = {*self.plan.after, *switches}
        compute = evaluation(self.original, wanted, self.after_names, self.after_results)
        return Evaluation(compute, self.after_inputs)

    def _apart(self) -> tuple[tuple[int, int], ...]:
        """See `FeedPlan`. Memory of the graph's own inputs is AOTAutograd's affair."""
        on_cpu = [
            name
            for name in self.placeholders
            if self.before.tensors[name] and self.before.tensors[name][0].device.type == "cpu"
        ]
        written = {storage for effects in self.before.effects.values() for storage in effects.writes}
        elsewhere = {
            *self.plan.stages,
            *(name for hoist in self.plan.hoists for name in hoist.attributes),
            *inputs_of(self.original, set(self.plan.before)),
            *self.after_names,
        }
        index = self.placeholders.index
        return tuple(
            (index(one), index(other))
            for one in on_cpu
            if not self._storages(one).isdisjoint(written)
            for other in on_cpu
            if other in elsewhere and self._storages(one).isdisjoint(self._storages(other))
        )

    def _attribute(self, name: str) -> Attribute:
        if name in self.placeholders:
            return Attribute(self.plan.guards[name], self.placeholders.index(name), None)
        return Attribute(self.plan.guards[name], None, attribute(self.original, self.original_node(name).target))

    def _layout(self, value: str) -> TensorLayout:
        """The layout of a copy on the GPU: that of `value` if it is dense, else without its gaps and overlaps."""
        (facts,) = self.before.tensors[value]
        with self.before.mode:
            copy = torch.empty_like(
                torch.empty_strided(facts.shape, facts.stride, dtype=facts.dtype, device=self.device)
            )
        return TensorLayout(tuple(copy.shape), tuple(copy.stride()), copy.dtype)

    def _computation(self, hoists: Sequence[Hoist]) -> torch.fx.GraphModule:
        """A graph on the CPU that computes the values of one group from its attributes."""
        wanted = {name for hoist in hoists for name in hoist.nodes}
        return evaluation(self.original, wanted, hoists[0].attributes, [hoist.value for hoist in hoists])

    def _add(self, make: Callable[[], torch.fx.Node]) -> torch.fx.Node:
        """A new node behind the inputs and what was added before."""
        if self.last_added is not None:
            context = self.graph.inserting_after(self.last_added)
        else:
            context = self.graph.inserting_before(next(iter(self.graph.nodes)))
        with context:
            self.last_added = make()
        return self.last_added

    def _placeholder(
        self, name: str, layout: TensorLayout, *, static: bool, device: torch.device | None = None
    ) -> torch.fx.Node:
        if name.startswith(PASSED):
            # These stand before the others, and are added last.
            first = self.fed[0] if self.fed else None
            follows = first if first is not None else self._behind_inputs()
            with self.graph.inserting_before(follows):
                node = self.graph.placeholder(name)
        else:
            node = self._add(lambda: self.graph.placeholder(name))
        with self.before.mode:
            node.meta["example_value"] = torch.empty_strided(
                layout.shape, layout.stride, dtype=layout.dtype, device=device or self.device
            )
        # AOTAutograd's cache tells inputs apart by their sources, and does not know which of them stay at their
        # address. So the source says it.
        torch_internals.describe_input(node, torch_internals.ConstantSource(name), static=static)
        return node

    def _behind_inputs(self) -> torch.fx.Node:
        return next(node for node in self.graph.nodes if node.op != "placeholder")

    def _literal(self, hoist: Hoist) -> torch.fx.Node:
        """The value as a number in the graph, which Inductor folds into the kernels that read it."""
        with torch.inference_mode(False), torch.no_grad(), torch_internals.disable_current_modes():
            try:
                (value,) = self._computation([hoist])()
            except Exception as error:
                # What the program raises, it shall raise when it is called.
                raise RewriteFailed(f"compute {hoist.value}", f"raises {type(error).__name__}: {error}") from error
        if value != value:
            # Generated code has one NaN. There are many, with a sign.
            raise RewriteFailed(f"compute {hoist.value}", "is not a number")
        settings = {"dtype": value.dtype, "device": self.device}
        node = self._add(lambda: self.graph.call_function(torch.full, ((), value.item()), settings))
        node.meta["stack_trace"] = self.original_node(hoist.value).meta.get("stack_trace")
        return node

    def _rebuilt(self, hoist: Hoist) -> torch.fx.Node:
        """The operations behind a value once more, on the GPU."""
        copies: dict[str, torch.fx.Node] = {}

        def copied(node: torch.fx.Node) -> torch.fx.Node:
            return self.graph.node_copy(node, lambda operand: copies[operand.name])

        for node in self.original.graph.nodes:
            if node.name in hoist.nodes:
                copies[node.name] = self._add(functools.partial(copied, node))
                retarget(copies[node.name], self.device)
        return copies[hoist.value]

    def _still_needed(self) -> set[str]:
        """Hoisted operations that something else in the graph still reads, with all they depend on."""
        hoisted = {name for name in self.hoisted if name in self.nodes}
        storages = {name: self._storages(name) for name in hoisted}
        elsewhere = {*hoisted, *self.plan.before}
        pending = [name for name in hoisted if any(user.name not in elsewhere for user in self.nodes[name].users)]
        needed = set(pending)
        while pending:
            current = pending.pop()
            operands = [operand.name for operand in self.nodes[current].all_input_nodes]
            writers = [name for name in hoisted if not self.before.effects[name].writes.isdisjoint(storages[current])]
            for name in (*operands, *writers):
                if name in hoisted and name not in needed:
                    needed.add(name)
                    pending.append(name)
        return needed


def _place_in(values: list[Any], value: Any) -> int:
    """The position of `value`, which is added if it is not there."""
    if value not in values:
        values.append(value)
    return values.index(value)


def _compare(
    name: str, before: Sequence[TensorFacts], after: Sequence[TensorFacts], device: torch.device | None
) -> None:
    """Raises unless `after` is as `before`, on `device` if that is given."""
    if len(before) != len(after):
        raise RewriteFailed(name, "holds another number of tensors on the GPU")
    for old, new in zip(before, after, strict=True):
        for what, expected, found in (
            ("device", device or old.device, new.device),
            ("dtype", old.dtype, new.dtype),
            ("shape", old.shape, new.shape),
            ("stride", old.stride, new.stride),
        ):
            if not _same(expected, found):
                raise RewriteFailed(name, f"has {what} {found} on the GPU where it should have {expected}")


def _grouped(hoists: Iterable[Hoist]) -> list[tuple[str, ...]]:
    """Values that are kept in memory, by the attributes they depend on, in order of the first of each group."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for hoist in hoists:
        if hoist.form == "kept":
            groups.setdefault(hoist.attributes, []).append(hoist.value)
    return [tuple(values) for values in groups.values()]


def _new_alias(node: torch.fx.Node, before: Observation, after: Observation) -> bool:
    """Whether `node` shares memory with an operand that it did not share memory with before."""
    for operand in node.all_input_nodes:
        shared_before = operand.name in before.tensors and before.share_memory(node.name, operand.name)
        if after.share_memory(node.name, operand.name) and not shared_before:
            return True
    return False


def _same(expected: Any, found: Any) -> bool:
    if isinstance(expected, tuple):
        return len(expected) == len(found) and all(map(_same, expected, found))
    if isinstance(expected, torch.SymInt) or isinstance(found, torch.SymInt):
        return statically_known_true(expected == found)
    return bool(expected == found)
