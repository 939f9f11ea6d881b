"""Collect the inputs and outputs of a rewritten graph, and build its feed plan from them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch.fx

from optimizations import torch_internals
from optimizations.placement.feed_plan import FeedPlan, HoistedGroup, Source, Staged
from optimizations.placement.original import Original
from optimizations.placement.sources import as_in_program, stays_between_calls


@dataclass(slots=True)
class Connections:
    """Hold the values that enter or leave the rewritten graph. Names are those of the original graph.

    `passed` are evaluated before the graph and read in it; `outputs` are what it returns, and `results` say where the
    results of the original are found. What is evaluated before it returns `before_results`; what is evaluated after it
    takes `after_inputs`, each with where it is found, and returns `after_results`.
    """

    passed: list[str] = field(default_factory=list)
    outputs: list[torch.fx.Node | None] = field(default_factory=list)
    results: list[Source] = field(default_factory=list)
    before_results: list[str] = field(default_factory=list)
    after_inputs: dict[str, Source] = field(default_factory=dict)
    after_results: list[str] = field(default_factory=list)

    def output(self, node: torch.fx.Node) -> Source:
        """Return where a result of the graph is found. The graph returns it from now on if it did not yet."""
        return Source("graph", _place_in(self.outputs, node))

    def before(self, name: str) -> Source:
        """Return where a value that is evaluated before the graph is found."""
        return Source("before", _place_in(self.before_results, name))

    def after(self, name: str) -> Source:
        """Return where a value that is evaluated after the graph is found."""
        return Source("after", _place_in(self.after_results, name))


def feed_plan(original: Original, connections: Connections, present: Collection[str]) -> FeedPlan:
    """Return how to call the rewritten graph in place of the original; it still has the original's inputs `present`."""
    plan, place = original.plan, original.placeholders.index
    groups = tuple(
        HoistedGroup(
            original.computation(members),
            tuple(map(place, members[0].attributes)),
            tuple(original.layout(hoist.value) for hoist in members),
            tuple(hoist.value in plan.awaited for hoist in members),
        )
        for members in original.groups()
    )
    staged = tuple(
        Staged(
            Source("argument", place(value)) if value in original.inputs else connections.before(value),
            original.layout(value),
            value in plan.awaited,
        )
        for value in plan.stages
    )
    passed = tuple(connections.before(name).index for name in connections.passed)
    given = {name: Source("argument", place(name)) for name in original.inputs_of(plan.before)}
    before = original.evaluation(plan.before, given, connections.before_results) if plan.before else None
    after = original.evaluation(plan.after, connections.after_inputs, connections.after_results) if plan.after else None
    results = connections.results
    changed = bool(plan.after) or any(source.where != "graph" for source in results)
    in_order = [source.index for source in results] == list(range(len(results)))
    return FeedPlan(
        device=original.device,
        kept=tuple(index for index, name in enumerate(original.placeholders) if name in present),
        hoisted=groups,
        staged=staged,
        keep_addresses=plan.keep_addresses,
        before=before,
        passed=passed,
        passed_layouts=tuple(map(original.cpu_layout, connections.passed)),
        after=after,
        results=tuple(results) if changed or not in_order else None,
        apart=_apart(original, connections),
        attributes=_attributes(original),
    )


def _apart(original: Original, connections: Connections) -> tuple[tuple[int, int], ...]:
    """Return `FeedPlan.apart`. AOTAutograd handles memory that the graph's own inputs share."""
    on_cpu = list(filter(original.is_cpu_input, original.placeholders))
    written = original.written_by(original.nodes)
    elsewhere = {*original.fed_from, *original.inputs_of(original.plan.before), *connections.after_inputs}
    index = original.placeholders.index
    return tuple(
        (index(one), index(other))
        for one in on_cpu
        if not original.storages(one).isdisjoint(written)
        for other in on_cpu
        if other in elsewhere and original.storages(one).isdisjoint(original.storages(other))
    )


def _attributes(original: Original) -> tuple[tuple[int, str], ...]:
    """Return `FeedPlan.attributes`."""
    sources = [torch_internals.dynamo_source(original.nodes[name]) for name in original.placeholders]
    return tuple(
        (index, as_in_program(source.name))
        for index, (name, source) in enumerate(zip(original.placeholders, sources, strict=True))
        if source is not None
        and stays_between_calls(source)
        and original.is_cpu_input(name)
        and original.cpu_layout(name).is_static
    )


def _place_in(values: list[Any], value: Any) -> int:
    """Return the position of `value`, which is added if it is not there."""
    if value not in values:
        values.append(value)
    return values.index(value)
