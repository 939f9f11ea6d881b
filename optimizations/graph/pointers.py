"""Find every place where a captured graph holds the address of an input, from two captures.

Between the captures each input's placeholder moved by its own distance. This classifies each value in the graph:

* it did not change: it is not an address of an input;
* it changed by the displacement of input i and points into i both times: it is the address of i plus an offset;
* it is an address in the graph's own memory both times: an intermediate;
* it changed by the displacement of i but points outside of it: i is copied, because its valid range is unknown;
* it also changes between two captures at the *same* addresses, or it stays constant when all inputs move once more
  (further captures): it is uninitialized padding and no address;
* four bytes of it are the lower half of an address that the graph holds elsewhere, and with the other four the word is
  no valid address: it is padding with stale bytes, because half an address is of no use;
* it changed in any other way: its input is unknown, so all inputs are copied.

Words at 8-byte steps that did not change, or are addresses in the graph's own memory both times, are found first, in
all parameters at once (`Moves.unsettled`). Around the others tensor maps are searched, then words at 8-byte steps, then
those at the 4-byte steps between them, so that pointers in packed structs are found and no half of a pointer counts as
a pointer. The search covers parameters only: it does not find addresses that the graph reads from memory, such as an
array of pointers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from optimizations.graph.moves import Moves, Origin, changed_items
from optimizations.graph.records import (
    WORD_BYTES,
    Capture,
    KernelNode,
    MemcpyEnd,
    MemcpyNode,
    MemsetNode,
    OtherNode,
    difference,
)
from optimizations.graph.tensor_map import TENSOR_MAP_BYTES, ReplaceAddress, find_tensor_maps

HALF_WORD_BYTES = 4

ADDRESS_BITS = 57
"""No address of a process has more, on a CPU with five levels of page tables."""

TRANSPARENT_NODES = frozenset({"EMPTY", "EVENT_RECORD", "WAIT_EVENT"})
"""Types of other nodes that hold no address of data. The contents of all remaining types cannot be read."""


class UseKind(StrEnum):
    """Name the kind of place that holds the address."""

    PARAMETER = "parameter"
    TENSOR_MAP = "tensor_map"
    MEMCPY_SOURCE = "memcpy_source"
    MEMCPY_DESTINATION = "memcpy_destination"
    MEMSET = "memset"


@dataclass(frozen=True, slots=True, order=True)
class PointerUse:
    """Name a place in the graph that holds the address of input `input` plus `delta` bytes.

    In a kernel node it is the word (the 128 bytes, for a tensor map) at `byte_offset` of parameter `parameter`; in
    other nodes both are 0.
    """

    node: int
    parameter: int
    byte_offset: int
    input: int
    delta: int
    kind: UseKind = UseKind.PARAMETER


class ReasonCode(StrEnum):
    """Name the reason why an input is copied."""

    EMPTY = "empty"
    NOT_MOVED = "not_moved"
    SAME_DISPLACEMENT = "same_displacement"
    AMBIGUOUS = "ambiguous"
    OUTSIDE = "outside"
    UNEXPLAINED = "unexplained"
    OPAQUE_NODE = "opaque_node"
    GRAPHS_DIFFER = "graphs_differ"
    NO_USE = "no_use"
    NO_UPDATER = "no_updater"
    OUTPUT_ALIAS = "output_alias"
    UNPROVEN = "unproven"
    CHEAPER = "cheaper"
    NOT_READABLE = "not_readable"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Reason:
    """Give the reason why an input is copied: a code for programs, a sentence for people."""

    code: ReasonCode
    message: str


@dataclass(frozen=True, slots=True)
class InputVerdict:
    """Hold the findings on one input. Without reasons against it, its address can be replaced everywhere."""

    input: int
    uses: tuple[PointerUse, ...]
    reasons: tuple[Reason, ...]

    @property
    def indirect(self) -> bool:
        return not self.reasons


@dataclass(frozen=True, slots=True, order=True)
class UnexplainedWord:
    """Name a word of a kernel parameter, or an address in a memcpy or memset node, whose change is unexplained."""

    node: int
    parameter: int
    byte_offset: int


@dataclass(frozen=True, slots=True)
class Analysis:
    """Hold the findings on every input, in order, and the unexplained words that exclude all of them."""

    verdicts: tuple[InputVerdict, ...]
    unexplained: tuple[UnexplainedWord, ...]

    @property
    def doubtful(self) -> bool:
        """Return whether a changed word may be padding, which one more capture could show."""
        outside = (reason.code is ReasonCode.OUTSIDE for verdict in self.verdicts for reason in verdict.reasons)
        return bool(self.unexplained) or any(outside)

    @property
    def uses(self) -> tuple[PointerUse, ...]:
        """Return all uses found, also those of inputs that are copied, ordered by node and place."""
        return tuple(sorted(use for verdict in self.verdicts for use in verdict.uses))


def find_pointer_uses(
    first: Capture,
    second: Capture,
    *,
    further: Sequence[Capture | None] = (),
    replace_address: ReplaceAddress | None = None,
) -> Analysis:
    """Return where the graph of `first` holds addresses of its inputs, and which inputs must be copied.

    Args:
        first, second: captures of the same work at different placeholder addresses. Inputs whose placeholders moved by
            the same distance are copied.
        further: more captures, to distinguish padding from hidden addresses: at the addresses of `first`, at those of
            `second`, or with every placeholder at an address that differs from `second`. None: it was not made.
        replace_address: replaces a tensor map's address (`tensor_map.driver_replace_address`); without it the words of
            tensor maps are unexplained.

    Raises:
        ValueError: the captures are not of the same inputs, or one of `further` has wrong placeholder addresses.
    """
    moves = Moves(first, second)
    more = [capture for capture in further if capture is not None]
    for capture in (second, *more):
        found = difference(first.graph, capture.graph)
        if found is not None:
            reason = Reason(ReasonCode.GRAPHS_DIFFER, f"the captures are not of the same work: {found}")
            return Analysis(tuple(InputVerdict(index, (), (reason,)) for index in moves.inputs), ())
    search = _Search(moves, replace_address, [_place(first, second, capture) for capture in more])
    changed = list(_changed_parameters(first, second))
    for position, words in moves.unsettled([(one.first, one.second) for one in changed]).items():
        one = changed[position]
        again = [capture.graph.nodes[one.node] for capture in more]
        further_bytes = [node.parameters[one.index].data for node in again if isinstance(node, KernelNode)]
        search.parameter(one, words, further_bytes)
    for index, nodes in enumerate(zip(first.graph.nodes, second.graph.nodes, strict=True)):
        search.visit(index, *nodes)
    return search.result()


@dataclass(frozen=True, slots=True)
class _Changed:
    """Hold a kernel parameter that differs in the two captures: parameter `index` of node `node`."""

    node: int
    index: int
    first: bytes
    second: bytes
    kernel: str | None


def _changed_parameters(first: Capture, second: Capture) -> Iterator[_Changed]:
    for node, (one, other) in enumerate(zip(first.graph.nodes, second.graph.nodes, strict=True)):
        if isinstance(one, KernelNode) and isinstance(other, KernelNode):
            for index, (before, after) in enumerate(zip(one.parameters, other.parameters, strict=True)):
                if before.data != after.data:
                    yield _Changed(node, index, before.data, after.data, one.name)


_Visited = KernelNode | MemcpyNode | MemsetNode | OtherNode


class _Place(Enum):
    """Name the placeholder addresses of a further capture."""

    AS_FIRST = auto()
    AS_SECOND = auto()
    ELSEWHERE = auto()


def _place(first: Capture, second: Capture, capture: Capture) -> _Place:
    if not any(Moves(first, capture).displacement.values()):
        return _Place.AS_FIRST
    displaced = Moves(second, capture).displacement.values()
    if any(displaced) and not all(displaced):
        raise ValueError("a further capture has some of its placeholders at their addresses in the second")
    return _Place.ELSEWHERE if any(displaced) else _Place.AS_SECOND


@dataclass(frozen=True, slots=True)
class _ChangedHalf:
    """Name the half of a word that changed, `offset` bytes into the parameter."""

    of: _Changed
    offset: int

    @property
    def halves(self) -> tuple[bytes, bytes]:
        """Return its bytes in both captures."""
        half = slice(self.offset, self.offset + HALF_WORD_BYTES)
        return self.of.first[half], self.of.second[half]

    @property
    def word_offset(self) -> int:
        """Return where its whole word begins."""
        return self.offset - self.offset % WORD_BYTES

    @property
    def words(self) -> tuple[bytes, bytes]:
        """Return its whole word in both captures."""
        word = slice(self.word_offset, self.word_offset + WORD_BYTES)
        return self.of.first[word], self.of.second[word]

    @property
    def may_be_left_over(self) -> bool:
        """Return whether it is half of a word that is not an address in either capture.

        A parameter of four bytes has no padding: the kernel's caller set that half.
        """
        return all(len(word) == WORD_BYTES and int.from_bytes(word, "little") >> ADDRESS_BITS for word in self.words)


class _Search:
    """Search a pair of captures that agree in shape, in one pass."""

    def __init__(self, moves: Moves, replace_address: ReplaceAddress | None, places: Sequence[_Place]) -> None:
        self._moves = moves
        self._places = places
        self._replace_address = replace_address
        self._uses: dict[int, list[PointerUse]] = defaultdict(list)
        self._against: dict[int, list[Reason]] = defaultdict(list)
        self._opaque: list[str] = []
        self._unexplained: dict[UnexplainedWord, str] = {}
        self._changed_halves: list[_ChangedHalf] = []

    def visit(self, node: int, first: _Visited, second: _Visited) -> None:
        """Search a node that is no kernel."""
        match first, second:
            case MemcpyNode(), MemcpyNode():
                self._memcpy_end(node, UseKind.MEMCPY_SOURCE, first.source, second.source)
                self._memcpy_end(node, UseKind.MEMCPY_DESTINATION, first.destination, second.destination)
            case MemsetNode(), MemsetNode():
                self._address(node, UseKind.MEMSET, first.address, second.address)
            case OtherNode(), _ if first.type_name not in TRANSPARENT_NODES:
                self._opaque.append(f"node {node} is of type {first.type_name}")

    def _memcpy_end(self, node: int, kind: UseKind, first: MemcpyEnd, second: MemcpyEnd) -> None:
        """Search one end of a copy. Inputs are never in host memory, so host addresses are not compared."""
        if first.memory != "host":
            self._address(node, kind, first.address, second.address)

    def _address(self, node: int, kind: UseKind, first: int, second: int) -> None:
        """Search the address of a memcpy or memset node."""
        if first != second and not self._word(node, kind, 0, 0, first, second):
            self._doubt(node, 0, 0, first, second)

    def parameter(self, one: _Changed, unsettled: Sequence[int], more: Sequence[bytes]) -> None:
        """Search the unsettled words of a kernel parameter; `more` are its bytes in the further captures."""
        node, parameter, first, second = one.node, one.index, one.first, one.second
        explained = bytearray(len(first))
        for offset in set(changed_items(first, second, WORD_BYTES)).difference(unsettled):
            explained[offset : offset + WORD_BYTES] = b"\1" * WORD_BYTES
        self._tensor_maps(one, explained, unsettled)
        for start in (0, HALF_WORD_BYTES):
            for offset in changed_items(first, second, WORD_BYTES, min(start, len(first))):
                word = slice(offset, offset + WORD_BYTES)
                if any(explained[word]):
                    continue
                values = (int.from_bytes(data[word], "little") for data in (first, second))
                if self._word(node, UseKind.PARAMETER, parameter, offset, *values):
                    explained[word] = b"\1" * WORD_BYTES
        # Unexplained changes are recorded by half words: padding can fill one half next to a value.
        rest = len(first) - len(first) % HALF_WORD_BYTES
        changed = [*changed_items(first, second, HALF_WORD_BYTES), *([rest] if first[rest:] != second[rest:] else [])]
        for offset in changed:
            half = slice(offset, offset + HALF_WORD_BYTES)
            if any(explained[half]):
                continue
            if self._is_left_over(first[half], second[half], [data[half] for data in more]):
                continue
            self._changed_halves.append(_ChangedHalf(one, offset))

    def _is_left_over(self, first: bytes, second: bytes, more: Sequence[bytes]) -> bool:
        """Return whether one of the further captures shows that this half belongs to no address.

        An address changes at least in its lower half if all inputs move, and does not change if none moves.
        """
        return any(
            (place is _Place.AS_FIRST and half != first)
            or (place is _Place.AS_SECOND and half != second)
            or (place is _Place.ELSEWHERE and half == second)
            for place, half in zip(self._places, more, strict=True)
        )

    def _tensor_maps(self, one: _Changed, explained: bytearray, unsettled: Sequence[int]) -> None:
        if self._replace_address is None or len(one.first) < TENSOR_MAP_BYTES:
            return
        for offset, origin in find_tensor_maps(one.first, one.second, unsettled, self._moves, self._replace_address):
            explained[offset : offset + TENSOR_MAP_BYTES] = b"\1" * TENSOR_MAP_BYTES
            self._uses[origin.input].append(
                PointerUse(one.node, one.index, offset, origin.input, origin.delta, UseKind.TENSOR_MAP)
            )

    def _word(self, node: int, kind: UseKind, parameter: int, offset: int, first: int, second: int) -> bool:
        """Record the word as an address of an input, if it is one; return whether it is explained."""
        origins = self._moves.origins(first, second)
        owned = self._moves.is_owned(first, second)
        for origin in origins:
            self._uses[origin.input].append(PointerUse(node, parameter, offset, origin.input, origin.delta, kind))
            if owned:
                message = f"{_location(node, parameter, offset)} may be its address or one in the graph's own memory"
                self._against[origin.input].append(Reason(ReasonCode.AMBIGUOUS, message))
        return bool(origins) or owned

    def _doubt(
        self, node: int, parameter: int, offset: int, first: int, second: int, kernel: str | None = None
    ) -> None:
        in_step = self._moves.in_step(first, second)
        for origin in in_step:
            message = (
                f"{_location(node, parameter, offset)} moved with it but points {origin.delta} bytes from its start, "
                f"outside its {self._moves.size_bytes(origin.input)} bytes"
            )
            self._against[origin.input].append(Reason(ReasonCode.OUTSIDE, message))
        if not in_step:
            where = f"{_location(node, parameter, offset)}{f' of {kernel[:80]}' if kernel else ''}"
            message = f"{where} changed between the captures, from {first:#x} to {second:#x}"
            self._unexplained[UnexplainedWord(node, parameter, offset)] = message

    def _judge_changed_halves(self) -> None:
        """Record a doubt for every changed word, unless the change is half of an address found elsewhere."""
        halves = {self._lower_halves(use) for uses in self._uses.values() for use in uses}
        words = {
            (one.of.node, one.of.index, one.word_offset): (*one.words, one.of.kernel)
            for one in self._changed_halves
            if not (one.may_be_left_over and one.halves in halves)
        }
        for place, (first, second, kernel) in words.items():
            self._doubt(*place, int.from_bytes(first, "little"), int.from_bytes(second, "little"), kernel)

    def _lower_halves(self, use: PointerUse) -> tuple[bytes, bytes]:
        """Return the lower four bytes of the address in the two captures."""
        origin = Origin(use.input, use.delta)
        addresses = (self._moves.first_address(origin), self._moves.second_address(origin))
        first, second = (address.to_bytes(WORD_BYTES, "little")[:HALF_WORD_BYTES] for address in addresses)
        return first, second

    def result(self) -> Analysis:
        self._judge_changed_halves()
        verdicts = []
        for index in self._moves.inputs:
            uses = tuple(sorted(self._uses[index]))
            verdicts.append(InputVerdict(index, uses, tuple(self._reasons(index, bool(uses)))))
        return Analysis(tuple(verdicts), tuple(sorted(self._unexplained)))

    def _reasons(self, index: int, used: bool) -> Iterator[Reason]:
        if self._moves.size_bytes(index) == 0:
            yield Reason(ReasonCode.EMPTY, "it holds no bytes, so there is nothing to gain")
        if not self._moves.displacement[index]:
            yield Reason(ReasonCode.NOT_MOVED, "its placeholder had the same address in both captures")
        for other in self._moves.sharing_displacement(index):
            yield Reason(
                ReasonCode.SAME_DISPLACEMENT,
                f"it moved by the same distance as input {other}, so addresses of the two, and differences of such "
                "addresses, cannot be told apart",
            )
        yield from self._against[index]
        if self._opaque:
            yield Reason(ReasonCode.OPAQUE_NODE, f"{self._opaque[0]}, which may hold addresses that cannot be read")
        if self._unexplained:
            message = next(iter(self._unexplained.values()))
            yield Reason(
                ReasonCode.UNEXPLAINED, f"{message}, and no input explains it ({len(self._unexplained)} such words)"
            )
        if not used:
            yield Reason(ReasonCode.NO_USE, "no use of its address was found: it is unused, or reached unseen")


def _location(node: int, parameter: int, offset: int) -> str:
    return f"node {node}, parameter {parameter}, byte {offset}"
