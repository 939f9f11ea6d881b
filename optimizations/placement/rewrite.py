"""FX surgery: turns a plan into a graph whose CPU values are inputs on the GPU, and a description of these inputs.

The user's graph stays as it is: Dynamo generates its calling code from it after the backend is done. Nothing is
allocated here; the inputs come to life in `feeds`, at the first call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from optimizations import torch_internals
from optimizations.placement.feed_plan import Attribute, FeedPlan, HoistedGroup, TensorLayout
from optimizations.placement.fx_editing import attribute, copy_of, retarget, returned
from optimizations.placement.observe import CannotObserve, Observation, TensorFacts, observe
from optimizations.placement.plan import Hoist, Plan

HOISTED = "encore_hoisted"
STAGED = "encore_staged"


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
    plan: Plan,
    observation: Observation,
    inputs: Sequence[Any],
) -> Rewritten:
    """The graph after `plan`, checked against the original's `observation` node by node.

    `inputs` are the ones that `observation` was made on.

    Raises:
        RewriteFailed: a node of the rewritten graph differs in shape, strides, dtype or device from what it should be.
    """
    surgery = _Surgery(graph_module, plan, observation, inputs)
    surgery.feed()
    surgery.move()
    surgery.sweep()
    after = surgery.check()
    if surgery.keep_copies(after):
        after = surgery.check()
    surgery.note_values(after)
    return Rewritten(surgery.result, surgery.feeds)


class _Surgery:
    def __init__(
        self,
        graph_module: torch.fx.GraphModule,
        plan: Plan,
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
        self.placeholders = [node.name for node in graph_module.graph.nodes if node.op == "placeholder"]
        self.inputs = dict(zip(self.placeholders, inputs, strict=True))
        self.fed: list[torch.fx.Node] = []
        self.rebuilt: dict[str, str] = {}
        self.last_added = self.nodes[self.placeholders[-1]] if self.placeholders else None
        self.feeds = self._feed_plan()

    def feed(self) -> None:
        """Adds values on the GPU behind the inputs and lets the readers read them."""
        replacements: dict[str, torch.fx.Node] = {}
        kept = [value for group in _grouped(self.plan.hoists) for value in group]
        for position, value in enumerate(kept):
            replacements[value] = self._placeholder(f"{HOISTED}_{position}", value, static=True)
        for position, value in enumerate(self.plan.stages):
            name = f"{STAGED}_{position}"
            replacements[value] = self._placeholder(name, value, static=self.plan.keep_addresses)
        self.fed = list(replacements.values())
        for hoist in self.plan.hoists:
            if hoist.form == "literal":
                replacements[hoist.value] = self._literal(hoist)
            elif hoist.form == "rebuilt":
                replacements[hoist.value] = self._rebuilt(hoist)
                self.rebuilt[hoist.value] = replacements[hoist.value].name
        for reader in self.plan.readers:
            for value, replacement in replacements.items():
                self.nodes[reader].replace_input_with(self.nodes[value], replacement)

    def move(self) -> None:
        """Lets the moved operations run on the GPU."""
        for name in self.plan.moves:
            retarget(self.nodes[name], self.device)

    def sweep(self) -> None:
        """Removes hoisted operations and CPU inputs that nobody reads any more."""
        hoisted = {name for hoist in self.plan.hoists for name in hoist.nodes}
        needed = self._still_needed(hoisted)
        for node in reversed(list(self.graph.nodes)):
            if node.name in hoisted and node.name not in needed:
                self.graph.erase_node(node)
        sources = {*self.plan.stages, *(name for hoist in self.plan.hoists for name in hoist.attributes)}
        for name in sources:
            if not self.nodes[name].users:
                self.graph.erase_node(self.nodes[name])
        remaining = [node.name for node in self.graph.nodes if node.op == "placeholder"]
        kept = tuple(index for index, name in enumerate(self.placeholders) if name in remaining)
        self.feeds = dataclasses.replace(self.feeds, kept=kept)
        self.graph.lint()
        self.result.recompile()

    def check(self) -> Observation:
        """Observes the rewritten graph and compares each node with its original."""
        kept = [self.inputs[self.placeholders[index]] for index in self.feeds.kept]
        added = [node.meta["example_value"] for node in self.fed]
        try:
            after = observe(self.result, [*kept, *added], mode=self.before.mode)
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
        candidates = [self.nodes[name] for name in self.plan.readers if name in self.plan.snapshots]
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

    def note_values(self, after: Observation) -> None:
        """Gives changed nodes the value Dynamo would have noted, for passes and reports that read it."""
        for node in self.graph.nodes:
            facts = after.tensors.get(node.name)
            if facts and facts != self.before.tensors.get(node.name) and node.op != "placeholder":
                node.meta["example_value"] = after.values[node.name]

    def _feed_plan(self) -> FeedPlan:
        hoists = {hoist.value: hoist for hoist in self.plan.hoists}
        groups = []
        for values in _grouped(self.plan.hoists):
            members = [hoists[value] for value in values]
            groups.append(
                HoistedGroup(
                    self._computation(members),
                    tuple(self._attribute(name) for name in members[0].attributes),
                    tuple(self._layout(value) for value in values),
                )
            )
        results = [node.name if isinstance(node, torch.fx.Node) else None for node in returned(self.original)]
        return FeedPlan(
            device=self.device,
            kept=tuple(range(len(self.placeholders))),
            hoisted=tuple(groups),
            staged=tuple(self.placeholders.index(name) for name in self.plan.stages),
            staged_layouts=tuple(self._layout(name) for name in self.plan.stages),
            cpu_outputs=tuple(i for i, name in enumerate(results) if name in self.plan.cpu_outputs),
            keep_addresses=self.plan.keep_addresses,
        )

    def _attribute(self, name: str) -> Attribute:
        if name in self.placeholders:
            return Attribute(self.plan.guards[name], self.placeholders.index(name), None)
        return Attribute(self.plan.guards[name], None, attribute(self.original, self.nodes[name].target))

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
        graph = torch.fx.Graph()
        copies = {name: graph.placeholder(name) for name in hoists[0].attributes}
        wanted = {name for hoist in hoists for name in hoist.nodes}
        for node in self.original.graph.nodes:
            if node.name in wanted:
                copies[node.name] = graph.node_copy(node, lambda operand: copies[operand.name])
                copies[node.name].meta = {}
        graph.output(tuple(copies[hoist.value] for hoist in hoists))
        return torch.fx.GraphModule(self.original, graph)

    def _add(self, make: Callable[[], torch.fx.Node]) -> torch.fx.Node:
        """A new node behind the inputs and what was added before."""
        if self.last_added is not None:
            context = self.graph.inserting_after(self.last_added)
        else:
            context = self.graph.inserting_before(next(iter(self.graph.nodes)))
        with context:
            self.last_added = make()
        return self.last_added

    def _placeholder(self, name: str, value: str, *, static: bool) -> torch.fx.Node:
        node = self._add(lambda: self.graph.placeholder(name))
        layout = self._layout(value)
        with self.before.mode:
            node.meta["example_value"] = torch.empty_strided(
                layout.shape, layout.stride, dtype=layout.dtype, device=self.device
            )
        # AOTAutograd's cache tells inputs apart by their sources, and does not know which of them stay at their
        # address. So the source says it.
        torch_internals.describe_input(node, torch_internals.ConstantSource(name), static=static)
        return node

    def _literal(self, hoist: Hoist) -> torch.fx.Node:
        """The value as a number in the graph, which Inductor folds into the kernels that read it."""
        with torch.inference_mode(False), torch.no_grad(), torch_internals.disable_current_modes():
            (value,) = self._computation([hoist])()
        settings = {"dtype": value.dtype, "device": self.device}
        node = self._add(lambda: self.graph.call_function(torch.full, ((), value.item()), settings))
        node.meta["stack_trace"] = self.nodes[hoist.value].meta.get("stack_trace")
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

    def _still_needed(self, hoisted: set[str]) -> set[str]:
        """Hoisted operations that something else in the graph still reads, with all they depend on."""
        storages = {name: {facts.storage for facts in self.before.tensors[name]} for name in hoisted}
        pending = [name for name in hoisted if any(user.name not in hoisted for user in self.nodes[name].users)]
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
