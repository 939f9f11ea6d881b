"""Describe the graph before a rewrite: layouts of its values, nodes that write them, and parts as separate graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
import torch.fx

from optimizations import torch_internals
from optimizations.placement.feed_plan import Evaluation, Source, TensorLayout
from optimizations.placement.observe import Observation
from optimizations.placement.plan import Hoist, PlacementPlan


class Original:
    """Hold a graph, its plan, and what was `observed` of it on `inputs`. Values have the names of their nodes."""

    def __init__(
        self,
        graph_module: torch.fx.GraphModule,
        plan: PlacementPlan,
        observed: Observation,
        inputs: Sequence[Any],
    ) -> None:
        self.graph_module = graph_module
        self.plan = plan
        self.observed = observed
        self.device = torch.device(plan.device)
        self.nodes: dict[str, torch.fx.Node] = {node.name: node for node in graph_module.graph.nodes}
        self.positions = {name: position for position, name in enumerate(self.nodes)}
        self.placeholders = [node.name for node in graph_module.graph.nodes if node.op == "placeholder"]
        self.inputs = dict(zip(self.placeholders, inputs, strict=True))
        self.hoisted = {name for hoist in plan.hoists for name in hoist.nodes}
        self.fed_from = {*plan.stages, *(name for hoist in plan.hoists for name in hoist.attributes)}

    def storages(self, name: str) -> set[int]:
        """Return the numbers of the storages that a value lies in, as in `Observation`."""
        return {facts.storage for facts in self.observed.tensors[name]}

    def is_cpu_input(self, name: str) -> bool:
        """Return whether an input is a tensor on the CPU."""
        facts = self.observed.tensors[name]
        return bool(facts) and facts[0].device.type == "cpu"

    def is_as_given(self, name: str) -> bool:
        """Return whether a value is an argument that is on the CPU or that the graph does not write."""
        return name in self.inputs and (self.is_cpu_input(name) or not self.last_write(name))

    def last_write(self, name: str) -> int:
        """Return the position of the last node that writes to the memory of a value; 0 if none does."""
        storages = self.storages(name)
        effects = self.observed.effects.items()
        writers = (other for other, found in effects if not storages.isdisjoint(found.writes))
        return max((self.positions[writer] for writer in writers), default=0)

    def written_by(self, names: Iterable[str]) -> set[int]:
        """Return the numbers of the storages that these nodes write."""
        effects = self.observed.effects
        return {storage for name in names if name in effects for storage in effects[name].writes}

    def groups(self) -> list[tuple[Hoist, ...]]:
        """Group the values that are kept in memory by the attributes they depend on, ordered by first member."""
        groups: dict[tuple[str, ...], list[Hoist]] = {}
        for hoist in self.plan.hoists:
            if hoist.form == "kept":
                groups.setdefault(hoist.attributes, []).append(hoist)
        return [tuple(hoists) for hoists in groups.values()]

    def layout(self, value: str) -> TensorLayout:
        """Return the layout of a copy on the GPU: that of `value` if it is dense, else without gaps and overlaps."""
        (facts,) = self.observed.tensors[value]
        with self.observed.mode:
            copy = torch.empty_like(
                torch.empty_strided(facts.shape, facts.stride, dtype=facts.dtype, device=self.device)
            )
        return TensorLayout(tuple(copy.shape), tuple(copy.stride()), copy.dtype)

    def cpu_layout(self, name: str) -> TensorLayout:
        """Return the layout of a value on its own device."""
        (facts,) = self.observed.tensors[name]
        return TensorLayout(facts.shape, facts.stride, facts.dtype)

    def computation(self, hoists: Sequence[Hoist]) -> torch.fx.GraphModule:
        """Return a graph on the CPU that computes the values of one group from its attributes."""
        wanted = {name for hoist in hoists for name in hoist.nodes}
        return self._extracted(wanted, hoists[0].attributes, [hoist.value for hoist in hoists])

    def evaluation(self, wanted: Iterable[str], sources: Mapping[str, Source], results: Sequence[str]) -> Evaluation:
        """Return the nodes `wanted` as a graph that computes `results`; `sources` say where what it reads is found.

        All nodes that switch gradients are in it, so that these are switched as in the original graph.
        """
        switches = (name for name, node in self.nodes.items() if node.target is torch_internals.set_grad_enabled)
        compute = self._extracted({*wanted, *switches}, tuple(sources), results)
        return Evaluation(compute, tuple(sources.values()))

    def inputs_of(self, wanted: Iterable[str]) -> tuple[str, ...]:
        """Return the names of the other nodes that these nodes read, in order of the graph."""
        own = set(wanted)
        read = {operand.name for name in own for operand in self.nodes[name].all_input_nodes} - own
        return tuple(sorted(read, key=self.positions.__getitem__))

    def _extracted(self, wanted: Set[str], inputs: Sequence[str], results: Iterable[str]) -> torch.fx.GraphModule:
        """Return the nodes `wanted`, in their order, as a function of `inputs` that returns `results`.

        Constants are made on the CPU even under another default device: the program's constants for other devices say
        so themselves.
        """
        graph = torch.fx.Graph()
        copies = {name: graph.placeholder(name) for name in inputs}
        for name, node in self.nodes.items():
            if name not in wanted or name in copies:
                continue
            copy = copies[name] = graph.node_copy(node, lambda operand: copies[operand.name])
            copy.meta = {}
            makes_tensors = node.op == "call_function" and node.target in torch_internals.device_constructors()
            if makes_tensors and copy.kwargs.get("device") is None:
                copy.kwargs = {**copy.kwargs, "device": torch.device("cpu")}
        graph.output(tuple(copies[name] for name in results))
        return torch.fx.GraphModule(self.graph_module, graph)
