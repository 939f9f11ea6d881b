"""Place the values of one FX graph: observe, plan, rewrite, and plan again without the parts that failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from optimizations import torch_internals
from optimizations.options import Options
from optimizations.placement.feed_plan import FeedPlan
from optimizations.placement.observe import CannotObserve, Observation, observe
from optimizations.placement.plan import Hoist, PlacementPlan, plan
from optimizations.placement.residency import Residency, ResidentNode, residency
from optimizations.placement.rewrite import rewrite
from optimizations.placement.sources import input_sources
from optimizations.placement.twin import RewriteFailed
from optimizations.report import Copy, CpuNode, Hoisted, Left, PlacementReport, Staged
from optimizations.written_operands import tensors_in

NOTHING_ON_A_GPU = (
    "no tensor is on a GPU; without one, the suite's `encore explain module:callable` tells what placement would do"
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Hold a graph after placement. `feeds` None: it is the original, and takes the original's arguments."""

    graph_module: torch.fx.GraphModule
    feeds: FeedPlan | None
    report: PlacementReport

    def example_inputs(self, original: Sequence[Any]) -> list[Any]:
        """Return inputs to compile `graph_module` with: the kept ones of `original`, and fake tensors for added ones.

        Nothing is allocated on a device.
        """
        if self.feeds is None:
            return list(original)
        mode = torch_internals.detect_fake_mode(list(original)) or torch_internals.FakeTensorMode()
        on_device = [layout for group in self.feeds.hoisted for layout in group.layouts]
        on_device += [staged.layout for staged in self.feeds.staged]
        added = [(layout, torch.device("cpu")) for layout in self.feeds.passed_layouts]
        added += [(layout, self.feeds.device) for layout in on_device]
        with mode:
            fakes = [
                torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)
                for layout, device in added
            ]
        return [*(original[index] for index in self.feeds.kept), *fakes]


def place(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options | None = None,
    *,
    held_bytes: int = 0,
) -> Placement:
    """Rewrite a graph of Dynamo so that its CPU values reach the GPU without a blocking copy.

    Works on real and on fake inputs, and needs no GPU. `graph_module` is not changed. Where nothing can be done the
    result holds it as it is, with the reason in the report. `held_bytes` is what placement keeps on the GPU already
    for other graphs of the process.
    """
    options = options or Options()
    if not options.placement:
        return untouched(graph_module, "placement is switched off")
    layouts = _layouts(graph_module, example_inputs)
    missing = _missing_device(graph_module, layouts)
    if missing is not None:
        return untouched(graph_module, missing)
    if any(node.target is torch_internals.enter_autocast and "cpu" in node.args for node in graph_module.graph.nodes):
        return untouched(graph_module, "the graph switches autocast on the CPU on and off")
    try:
        observation = observe(graph_module, layouts, same_memory_as=example_inputs)
    except CannotObserve as error:
        return untouched(graph_module, f"not analysed: {error}")
    graph = _residency(graph_module, example_inputs, observation)
    return _Attempts(graph_module, layouts, observation, graph, options, held_bytes).outcome()


def _residency(
    graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], observation: Observation
) -> Residency:
    placeholders = [node.name for node in graph_module.graph.nodes if node.op == "placeholder"]
    requires_grad = {
        name: isinstance(example, torch.Tensor) and example.requires_grad
        for name, example in zip(placeholders, example_inputs, strict=True)
    }
    sources = input_sources(graph_module, list(example_inputs))
    return residency(graph_module, observation, sources, requires_grad)


@dataclass(frozen=True, slots=True)
class _Attempts:
    graph_module: torch.fx.GraphModule
    layouts: Sequence[Any]
    observation: Observation
    graph: Residency
    options: Options
    held_bytes: int

    def outcome(self) -> Placement:
        devices = self.graph.devices
        if not devices:
            return untouched(self.graph_module, NOTHING_ON_A_GPU, self._before())
        if len(devices) > 1 or not devices[0].startswith("cuda"):
            reason = f"placement moves values to one CUDA device; here: {', '.join(devices)}"
            return untouched(self.graph_module, reason, self._before())
        vetoes: dict[str, str] = {}
        while True:
            decided = plan(self.graph, self.options, vetoes, held_bytes=self.held_bytes)
            if decided.is_empty:
                return untouched(self.graph_module, "nothing could be moved", self._before(), decided.left)
            try:
                graph_module, feeds = rewrite(self.graph_module, decided, self.observation, self.layouts)
            except RewriteFailed as error:
                known = error.node.startswith("compute ")
                unit = error.node if known else self._unit_of(error.node, decided)
                if unit is None or unit in vetoes:
                    return untouched(self.graph_module, f"not rewritten: {error}", self._before(), decided.left)
                vetoes[unit] = error.reason
                continue
            return Placement(graph_module, feeds, self._report(decided, graph_module))

    def _unit_of(self, node: str, decided: PlacementPlan) -> str | None:
        """Return the nearest operation with fed operands that `node` is or is computed from."""
        pending, seen = [node], {node}
        while pending:
            name = pending.pop(0)
            if name in decided.fed:
                return name
            operands = self.graph.nodes[name].operands if name in self.graph.nodes else ()
            for operand in operands:
                if operand not in seen:
                    seen.add(operand)
                    pending.append(operand)
        return None

    def _report(self, decided: PlacementPlan, graph_module: torch.fx.GraphModule) -> PlacementReport:
        before = self._before()
        in_graph = {node.name for node in graph_module.graph.nodes}
        after = tuple(node for node in before.cpu_nodes_before if node.node in in_graph)
        gone = {(name, value) for name, values in decided.fed.items() for value in values}
        copies = tuple(
            copy for copy in before.copies_before if (copy.node, copy.value) not in gone and copy.node in in_graph
        )
        staged = tuple(self._staged(name) for name in decided.stages)
        if staged:
            sizes = [entry.staged_bytes for entry in staged]
            total = None if None in sizes else sum(size or 0 for size in sizes)
            copies = (Copy("staging", ", ".join(entry.node for entry in staged), total, False, None), *copies)
        return replace(
            before,
            cpu_nodes_after=after,
            copies_after=copies,
            hoisted=tuple(map(self._hoisted, decided.hoists)),
            staged=staged,
            before=tuple(name for name in decided.before if self.graph.nodes[name].is_call),
            after=decided.after,
            cpu_outputs=tuple(name for name in dict.fromkeys(self.graph.returned) if name in decided.after),
            left=decided.left,
        )

    def _before(self) -> PlacementReport:
        cpu_nodes = tuple(map(self._cpu_node, self.graph.cpu_nodes()))
        return PlacementReport(
            device=self.graph.devices[0] if len(self.graph.devices) == 1 else None,
            untouched=None,
            nodes=self.graph.node_count,
            cpu_nodes_before=cpu_nodes,
            copies_before=tuple(self.graph.copies()),
        )

    def _cpu_node(self, node: ResidentNode) -> CpuNode:
        kind = self.graph.kind(node)
        return CpuNode(node.name, node.operation, kind, node.shape, node.dtype, node.source_line)

    def _hoisted(self, hoist: Hoist) -> Hoisted:
        node = self.graph.nodes[hoist.value]
        names = tuple(self.graph.nodes[name].operation for name in hoist.attributes)
        size = (node.value_bytes or 0) if hoist.form == "kept" else 0
        return Hoisted(node.name, hoist.form, node.shape or (), node.dtype or "", size, names, node.source_line)

    def _staged(self, name: str) -> Staged:
        node = self.graph.nodes[name]
        return Staged(name, node.operation, node.shape or (), node.dtype or "", node.value_bytes, node.source_line)


def untouched(
    graph_module: torch.fx.GraphModule,
    reason: str,
    before: PlacementReport | None = None,
    left: tuple[Left, ...] = (),
) -> Placement:
    """Return the placement of an unchanged graph. `before` holds the facts that are known about it."""
    known = before or PlacementReport(device=None, untouched=None, nodes=len(graph_module.graph.nodes))
    report = replace(
        known, untouched=reason, cpu_nodes_after=known.cpu_nodes_before, copies_after=known.copies_before, left=left
    )
    return Placement(graph_module, None, report)


def _layouts(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Return Dynamo's fake value of each input (with symbolic sizes), or the example itself if it has none."""
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    pairs = zip(placeholders, example_inputs, strict=True)
    return [_layout(node.meta.get("example_value", example), example) for node, example in pairs]


def _layout(noted: Any, example: Any) -> Any:
    """Return `noted`, or `example` where the graph changes the input's shape and Dynamo noted the shape afterwards."""
    if not isinstance(noted, torch.Tensor):
        return noted
    sizes = [(a, b) for a, b in zip(noted.shape, example.shape, strict=False) if isinstance(a, int)]
    strides = [(a, b) for a, b in zip(noted.stride(), example.stride(), strict=False) if isinstance(a, int)]
    same = noted.dim() == example.dim() and all(a == b for a, b in (*sizes, *strides) if isinstance(b, int))
    return noted if same else example


def _missing_device(graph_module: torch.fx.GraphModule, layouts: Sequence[Any]) -> str | None:
    """Return why placement has nothing to do, judged by the values that Dynamo noted; None where it may have."""
    noted = [*layouts, *(node.meta.get("example_value") for node in graph_module.graph.nodes)]
    devices = {tensor.device.type for tensor in tensors_in(noted)}
    came_from_dynamo = "dynamo_compile_id" in graph_module.meta
    if came_from_dynamo and "cuda" not in devices:
        return NOTHING_ON_A_GPU
    return "nothing is on the CPU" if came_from_dynamo and "cpu" not in devices else None
