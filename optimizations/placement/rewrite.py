"""Turn a plan into an FX graph whose CPU values are inputs on the GPU, and a description of these inputs.

The user's graph stays as it is: Dynamo generates its calling code from it after the backend is done. Nothing is
allocated here; `feeds` allocates the inputs at the first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from optimizations import torch_internals
from optimizations.placement.connections import Connections, feed_plan
from optimizations.placement.feed_plan import FeedPlan, Source, TensorLayout
from optimizations.placement.observe import CannotObserve, Observation, observe
from optimizations.placement.original import Original
from optimizations.placement.plan import Hoist, PlacementPlan
from optimizations.placement.regions import reached
from optimizations.placement.twin import RewriteFailed, check_kept, check_passed, compare, new_alias
from optimizations.torch_internals.geometry import is_lazy_view

ADDED = "encore_"
HOISTED = f"{ADDED}hoisted"
STAGED = f"{ADDED}staged"
PASSED = f"{ADDED}passed"


def rewrite(
    graph_module: torch.fx.GraphModule,
    plan: PlacementPlan,
    observation: Observation,
    inputs: Sequence[Any],
) -> tuple[torch.fx.GraphModule, FeedPlan]:
    """Return the graph after `plan`, and how arguments and results of the original map to its own.

    It is checked against the original's `observation` node by node. `inputs` are those of that observation.

    Raises:
        RewriteFailed: a node of the rewritten graph differs in shape, strides, dtype or device from what it should be,
            or would write to what later calls read.
    """
    surgery = _Surgery(Original(graph_module, plan, observation, inputs))
    surgery.feed()
    surgery.give_out()
    surgery.sweep()
    after = surgery.check()
    if surgery.keep_copies(after):
        after = surgery.check()
    surgery.protect(after)
    surgery.note_values(after)
    return surgery.result, feed_plan(surgery.original, surgery.connections, set(surgery.inputs()))


class _Surgery:
    def __init__(self, original: Original) -> None:
        self.original = original
        self.plan = original.plan
        self.before = original.observed
        self.device = original.device
        self.result = copy_of(original.graph_module)
        self.graph = self.result.graph
        self.nodes = dict(zip(original.nodes, self.graph.nodes, strict=True))
        renamed = [name for name, copy in self.nodes.items() if copy.name != name]
        if renamed:
            raise RewriteFailed(renamed[0], "its copy got another name")
        self.connections = Connections()
        self.fed: list[torch.fx.Node] = []
        self.first = self._after_inputs()

    def feed(self) -> None:
        """Add values on the GPU after the inputs and make the readers read them."""
        replacements: dict[str, torch.fx.Node] = {}
        kept = [hoist.value for group in self.original.groups() for hoist in group]
        for position, value in enumerate(kept):
            replacements[value] = self._placeholder(f"{HOISTED}_{position}", self.original.layout(value), static=True)
        for position, value in enumerate(self.plan.stages):
            name = f"{STAGED}_{position}"
            replacements[value] = self._placeholder(name, self.original.layout(value), static=self.plan.keep_addresses)
        self.fed = list(replacements.values())
        for hoist in self.plan.hoists:
            if hoist.form == "literal":
                replacements[hoist.value] = self._literal(hoist)
        for reader, values in self.plan.fed.items():
            for value in values:
                if value in replacements:
                    self.nodes[reader].replace_input_with(self.nodes[value], replacements[value])

    def _cloned_for_readers(self, name: str) -> torch.fx.Node:
        """Return a clone of a node, which all its readers read instead.

        Inductor takes any `clone` of something that the graph computes away, also where two of them are returned, which
        then share memory. The operator that is taken here it leaves where it is, but that has no derivative.

        Raises:
            RewriteFailed: the node gives a list, or may need a derivative.
        """
        node = self.nodes[name]
        if not isinstance(self.before.values[name], torch.Tensor):
            raise RewriteFailed(name, "gives a list of one tensor, which nothing copies")
        for operand in self.original.nodes[name].all_input_nodes:
            seen = operand.meta.get("example_value", self.before.values.get(operand.name))
            if isinstance(seen, torch.Tensor) and seen.requires_grad:
                raise RewriteFailed(name, "is a copy through which gradients go")
        with self.graph.inserting_after(node):
            clone = self.graph.call_function(torch_internals.clone_that_stays, (node,))
        clone.meta = dict(node.meta)
        node.replace_all_uses_with(clone, delete_user_cb=lambda user: user is not clone)
        return clone

    def give_out(self) -> None:
        """Make the graph return what it computes itself, and note where each result of the original is found."""
        after, before = set(self.plan.after), set(self.plan.before)
        connections = self.connections
        for value in returned(self.original.graph_module):
            name = value.name if isinstance(value, torch.fx.Node) else None
            if name is None:
                source = Source("constant", 0, value)
            elif name in after:
                source = connections.after(name)
            elif name in before:
                source = connections.before(name)
            else:
                source = connections.output(self.nodes[name])
            connections.results.append(source)
        for name in self.original.inputs_of(after):
            if name in before:
                source = connections.before(name)
            elif self.original.is_as_given(name):
                source = Source("argument", self.original.placeholders.index(name))
            else:
                source = connections.output(self._at_its_time(name))
            connections.after_inputs[name] = source
        output = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        output.args = (tuple(connections.outputs),)
        for name in reversed(self.plan.after):
            if not self.nodes[name].users:
                self.graph.erase_node(self.nodes.pop(name))
        left_over = [name for name in self.plan.after if name in self.nodes]
        if left_over:
            raise RewriteFailed(left_over[0], "is read in the graph as well as after it")

    def _at_its_time(self, name: str) -> torch.fx.Node:
        """Return a value that is read after the graph, as it is where the original graph reads it."""
        readers = [user.name for user in self.original.nodes[name].users if user.name in self.plan.after]
        if self.original.last_write(name) <= min(self.original.positions[reader] for reader in readers):
            return self.nodes[name]
        if len(readers) > 1:
            raise RewriteFailed(name, "is read after the graph at several times, and written in between")
        with self.graph.inserting_before(self.nodes[readers[0]]):
            clone = self.graph.call_method("clone", (self.nodes[name],))
        clone.meta = dict(self.nodes[name].meta)
        return clone

    def sweep(self) -> None:
        """Remove what is evaluated elsewhere, and CPU inputs that are not read any more."""
        original = self.original
        needed = self._still_needed()
        for node in reversed(list(self.graph.nodes)):
            name = node.name
            if name in self.plan.before:
                if node.users and self.before.tensors[name]:
                    self._pass_on(node)
                if not node.users:
                    self.graph.erase_node(self.nodes.pop(name))
            elif name in original.hoisted and name not in needed:
                self.graph.erase_node(self.nodes.pop(name))
        read_elsewhere = {
            *original.fed_from,
            *original.inputs_of(self.plan.before),
            *self.connections.after_inputs,
        }
        for name in read_elsewhere & set(original.placeholders):
            if not self.nodes[name].users and original.is_cpu_input(name):
                self.graph.erase_node(self.nodes.pop(name))
        check_passed(original, self.connections.passed, {node.name for node in self.graph.nodes})
        self.graph.lint()
        self.result.recompile()

    def _still_needed(self) -> set[str]:
        """Return hoisted operations that other nodes in the graph still read, with all they depend on."""
        hoisted = {name for name in self.original.hoisted if name in self.nodes}
        storages = {name: self.original.storages(name) for name in hoisted}
        elsewhere = {*hoisted, *self.plan.before}

        def needed_by(name: str) -> set[str]:
            operands = {operand.name for operand in self.nodes[name].all_input_nodes}
            writers = {one for one in hoisted if not self.before.effects[one].writes.isdisjoint(storages[name])}
            return (operands | writers) & hoisted

        read = (name for name in hoisted if any(user.name not in elsewhere for user in self.nodes[name].users))
        return reached(read, needed_by)

    def _pass_on(self, node: torch.fx.Node) -> None:
        """Make the nodes that stay in the graph read a value that is evaluated before it."""
        name = node.name
        if len(self.before.tensors[name]) != 1:
            # Its members are values of their own, and the same operators unpack them here.
            if not self.original.written_by(self.original.nodes).isdisjoint(self.original.storages(name)):
                raise RewriteFailed(name, "is evaluated before the graph and written in it")
            return
        value = self.before.values[name]
        if isinstance(value, torch.Tensor) and is_lazy_view(value):
            # Generated code reads the memory as it is.
            raise RewriteFailed(name, "is evaluated before the graph, and conjugate or negative only by a flag")
        passed = self._placeholder(
            f"{PASSED}_{len(self.connections.passed)}",
            self.original.cpu_layout(name),
            static=False,
            device=self.before.tensors[name][0].device,
        )
        self.connections.passed.append(name)
        node.replace_all_uses_with(passed)

    def check(self) -> Observation:
        """Observe the rewritten graph and compare each node with its original."""
        added = {node.name: node.meta["example_value"] for node in self.graph.nodes if node.name.startswith(ADDED)}
        given = [added[name] if name in added else self.original.inputs[name] for name in self.inputs()]
        try:
            after = observe(self.result, given, mode=self.before.mode)
        except CannotObserve as error:
            raise RewriteFailed(error.node, str(error)) from error
        compare(self.original, after)
        return after

    def inputs(self) -> list[str]:
        """Return the names of the inputs of the result."""
        return [node.name for node in self.graph.nodes if node.op == "placeholder"]

    def keep_copies(self, after: Observation) -> bool:
        """Clone what used to be a copy to another device and now is an alias; return whether there was any."""
        candidates = [name for name in self.plan.fed if name in self.plan.snapshots]
        aliases = [name for name in candidates if new_alias(self.nodes[name], self.before, after)]
        for name in aliases:
            self._cloned_for_readers(name)
        if aliases:
            self.graph.lint()
            self.result.recompile()
        return bool(aliases)

    def protect(self, after: Observation) -> None:
        """Check that no node writes to what is kept for later calls, and that the caller does not get it."""
        outputs = returned(self.result)
        given_out = {outputs[source.index] for source in self.connections.results if source.where == "graph"}
        check_kept(self.fed, given_out, after)

    def note_values(self, after: Observation) -> None:
        """Give changed nodes the value Dynamo would have noted, for passes and reports that read it."""
        for node in self.graph.nodes:
            facts = after.tensors.get(node.name)
            if facts and facts != self.before.tensors.get(node.name) and node.op != "placeholder":
                node.meta["example_value"] = after.values[node.name]

    # What is added to the graph, after the inputs and after the nodes added before.

    def _placeholder(
        self, name: str, layout: TensorLayout, *, static: bool, device: torch.device | None = None
    ) -> torch.fx.Node:
        follows = self.first
        if name.startswith(PASSED):  # these stand before the others, and are added last
            follows = self.fed[0] if self.fed else self._after_inputs()
        with self.graph.inserting_before(follows):
            node = self.graph.placeholder(name)
        with self.before.mode:
            node.meta["example_value"] = torch.empty_strided(
                layout.shape, layout.stride, dtype=layout.dtype, device=device or self.device
            )
        # AOTAutograd's cache distinguishes inputs by their sources, and has no record of which of them stay at their
        # address. So the source says it.
        torch_internals.describe_input(node, torch_internals.ConstantSource(name), static=static)
        return node

    def _after_inputs(self) -> torch.fx.Node:
        return next(node for node in self.graph.nodes if node.op != "placeholder")

    def _literal(self, hoist: Hoist) -> torch.fx.Node:
        """Add the value as a number in the graph, which Inductor folds into the kernels that read it."""
        with torch.inference_mode(False), torch.no_grad(), torch_internals.disable_current_modes():
            try:
                (value,) = self.original.computation([hoist])()
            except Exception as error:
                # What the program raises, it shall raise when it is called.
                raise RewriteFailed(f"compute {hoist.value}", f"raises {type(error).__name__}: {error}") from error
        if value != value:
            # Generated code has one NaN. There are many, with a sign.
            raise RewriteFailed(f"compute {hoist.value}", "is not a number")
        settings = {"dtype": value.dtype, "device": self.device}
        with self.graph.inserting_before(self.first):
            node = self.graph.call_function(torch.full, ((), value.item()), settings)
        node.meta["stack_trace"] = self.original.nodes[hoist.value].meta.get("stack_trace")
        return node


def copy_of(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy of a graph module with nodes of the same names and everything that Dynamo noted on the original.

    Dynamo's records of real inputs are not taken along: they would keep these alive.
    """
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, copies))
    result = torch.fx.GraphModule(graph_module, graph)
    for original, copy in copies.items():
        copy.meta.pop("grapharg", None)
        torch_internals.copy_notes(original, copy)
    for name, child in graph_module.named_children():
        # Graphs for saved tensors' hooks are children that no node refers to.
        if not hasattr(result, name):
            result.add_module(name, child)
    result.meta.update(graph_module.meta)
    torch_internals.copy_notes(graph_module, result)
    return result


def returned(graph_module: torch.fx.GraphModule) -> Sequence[Any]:
    """Return the values that the graph returns, in order."""
    output = next(node for node in reversed(graph_module.graph.nodes) if node.op == "output")
    (values,) = output.args
    return values if isinstance(values, (tuple, list)) else (values,)
