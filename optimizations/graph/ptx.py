"""Implement the updater `ptx`: nodes launch a rewritten Triton kernel that reads its pointers from the pointer table.

Triton loads each pointer parameter once, `ld.param.b64 %rd1, [k_param_0];`. Behind that load one line is added,
`ld.global.b64 %rd1, [%rd1];`: the parameter then holds the address of a slot of the pointer table, and the slot the
pointer. Nothing else of the kernel changes. (The transformation is GraCE's "parameter indirection" for Triton.)

Only what is understood is rewritten. A parameter that is anything but a 64-bit word loaded by exactly one plain
`ld.param` is refused with the reason: byte arrays (tensor maps are passed so), an address that is taken (`mov`,
`cvta.param`), a load that is predicated, partial or repeated.

The parameters of a kernel are numbered as in its signature, which is how the driver numbers those of a kernel node.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizations.compiled_cache import Compiled, CompiledCache
from optimizations.graph.driver import check
from optimizations.graph.editing import EditableGraph, LaunchParameters, pointer
from optimizations.graph.plan import Available, Choice, PlannedNode, Slot, Slots
from optimizations.graph.pointers import PointerUse, UseKind
from optimizations.graph.protocol import ApplierGpu, ApplierTools, Attached
from optimizations.graph.records import Node

POINTER_TYPES = frozenset({".u64", ".b64", ".s64"})
PLAIN_LOADS = frozenset(f"ld.param{entry}.{kind}64" for entry in ("", "::entry") for kind in ("b", "u", "s"))

SLOT_ALIGNMENT_BYTES = 8

_TOKEN = re.compile(
    r"""
      (?P<skip>    \s+ | //[^\n]* | /\*.*?\*/ )
    | (?P<string>  "(?:\\.|[^"\\\n])*" )
    | (?P<name>    [.]?[A-Za-z_$%][\w$]*(?:(?:[.]|::)[\w$]+)* )
    | (?P<number>  \d[\w.]* )
    | (?P<sign>    . )
    """,
    re.VERBOSE | re.DOTALL,
)


class PtxError(ValueError):
    """The PTX is not of the form that can be rewritten; the message says what was found."""


@dataclass(frozen=True, slots=True)
class PtxParameter:
    """Describe one parameter of an entry. `refusal` is None where it can be dereferenced; an unused one always can."""

    name: str
    refusal: str | None
    used: bool


@dataclass(frozen=True, slots=True)
class PtxKernel:
    """Describe an entry of a PTX module: its name, the module's target (`sm_90a`), and its parameters in order."""

    name: str
    target: str
    parameters: tuple[PtxParameter, ...]

    @property
    def refusals(self) -> tuple[str | None, ...]:
        """Return why each parameter cannot be dereferenced, None where it can."""
        return tuple(parameter.refusal for parameter in self.parameters)


def read_kernel(ptx: str, name: str | None = None) -> PtxKernel:
    """Return what can be dereferenced in entry `name` (by default the only one).

    Raises:
        PtxError: the module has no such entry, more than one and no name was given, no 64-bit addresses or no target.
    """
    tokens = _tokenise(ptx)
    entry = _find_entry(tokens, name)
    parameters = tuple(
        PtxParameter(one.name, one.refusal or _use_refusal(uses, entry.body), bool(uses))
        for one, uses in ((one, entry.uses[one.name]) for one in entry.parameters)
    )
    return PtxKernel(entry.name, _target(tokens), parameters)


def dereference(ptx: str, parameters: Collection[int], name: str | None = None) -> str:
    """Return the module with these parameters (by number) of entry `name` read through one more pointer each.

    Raises:
        PtxError: as for `read_kernel`, or a parameter does not exist or is refused.
    """
    kernel = read_kernel(ptx, name)
    entry = _find_entry(_tokenise(ptx), kernel.name)
    edits: list[tuple[int, int, str]] = []
    for index in sorted(set(parameters)):
        if not 0 <= index < len(entry.parameters):
            raise PtxError(f"{kernel.name} has {len(entry.parameters)} parameters, so there is none of number {index}")
        refusal = kernel.parameters[index].refusal
        if refusal is not None:
            raise PtxError(f"parameter {index} of {kernel.name} cannot be dereferenced: {refusal}")
        declaration = entry.parameters[index]
        if declaration.alignment is not None:
            edits.append((*declaration.alignment.span, str(SLOT_ALIGNMENT_BYTES)))
        for position in entry.uses[declaration.name]:
            register, end = entry.body[position - 3].text, entry.body[position + 2].span[1]
            edits.append((end, end, f"\n\tld.global.b64 \t{register}, [{register}];"))
    for start, end, text in sorted(edits, reverse=True):
        ptx = ptx[:start] + text + ptx[end:]
    return ptx


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    span: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Declaration:
    """Hold a parameter as declared. `alignment` is the number token of a `.ptr ... .align N` annotation."""

    name: str
    refusal: str | None
    alignment: _Token | None


@dataclass(frozen=True, slots=True)
class _Entry:
    """Hold an entry's parameters and body, and where in the body each parameter's name stands."""

    name: str
    parameters: tuple[_Declaration, ...]
    body: Sequence[_Token]
    uses: Mapping[str, Sequence[int]]


def _tokenise(ptx: str) -> list[_Token]:
    tokens = []
    for match in _TOKEN.finditer(ptx):
        if match.lastgroup == "skip":
            continue
        if match.lastgroup == "sign" and match.group() == '"':
            raise PtxError(f"a string that does not end, at character {match.start()}")
        tokens.append(_Token(match.group(), match.span()))
    return tokens


def _target(tokens: Sequence[_Token]) -> str:
    words = [token.text for token in tokens]
    if ".address_size" in words and words[words.index(".address_size") + 1] != "64":
        raise PtxError("the module has no 64-bit addresses")
    if ".target" not in words:
        raise PtxError("the module names no .target")
    return words[words.index(".target") + 1]


def _find_entry(tokens: Sequence[_Token], name: str | None) -> _Entry:
    entries = {entry.name: entry for entry in _entries(tokens)}
    if name is None and len(entries) == 1:
        return next(iter(entries.values()))
    if name is None or name not in entries:
        wanted = "which kernel is meant" if name is None else f"no entry {name}"
        raise PtxError(f"{wanted}: the module defines {', '.join(entries) or 'no kernel'}")
    return entries[name]


def _entries(tokens: Sequence[_Token]) -> Iterator[_Entry]:
    """Yield entries with a body; a declaration without one (`.entry k();`) is passed over."""
    for position, token in enumerate(tokens):
        if token.text != ".entry":
            continue
        name = tokens[position + 1].text if position + 1 < len(tokens) else ""
        after, declarations = position + 2, []
        if after < len(tokens) and tokens[after].text == "(":
            end = _closing(tokens, after, name)
            declarations = _split(tokens[after + 1 : end])
            after = end + 1
        while after < len(tokens) and tokens[after].text not in ("{", ";", ".entry"):
            after += 1
        if after < len(tokens) and tokens[after].text == "{":
            body = tokens[after + 1 : _closing(tokens, after, name)]
            parameters = tuple(_declaration(one) for one in declarations)
            uses: dict[str, list[int]] = {one.name: [] for one in parameters}
            for place, word in enumerate(body):
                if word.text in uses:
                    uses[word.text].append(place)
            yield _Entry(name, parameters, body, uses)


def _closing(tokens: Sequence[_Token], opening: int, name: str) -> int:
    """Return the position of the bracket that closes the one at `opening`."""
    left = tokens[opening].text
    right = {"(": ")", "{": "}"}[left]
    depth = 0
    for position in range(opening, len(tokens)):
        depth += (tokens[position].text == left) - (tokens[position].text == right)
        if not depth:
            return position
    raise PtxError(f"the {left} of entry {name} is never closed; is the file truncated?")


def _split(tokens: Sequence[_Token]) -> list[list[_Token]]:
    """Return the declarations of a parameter list, without the commas between them."""
    parts: list[list[_Token]] = [[]]
    for token in tokens:
        if token.text == ",":
            parts.append([])
        else:
            parts[-1].append(token)
    return [part for part in parts if part]


def _declaration(tokens: Sequence[_Token]) -> _Declaration:
    """Read a declaration: only `.param TYPE [.ptr [SPACE] [.align N]] NAME` of a 64-bit word is not refused."""
    words = [token.text for token in tokens]
    if words[-1] == "]":
        name = words[words.index("[") - 1]
        return _Declaration(name, f"it is a byte array ({' '.join(words)})", None)
    name, middle = words[-1], words[1:-1]
    if words[0] != ".param" or not middle:
        return _Declaration(name, f"its declaration is not understood ({' '.join(words)})", None)
    kind, annotation = middle[0], middle[1:]
    if kind not in POINTER_TYPES:
        return _Declaration(name, f"it is of type {kind}, not a 64-bit word", None)
    if not annotation:
        return _Declaration(name, None, None)
    if annotation[0] != ".ptr":
        return _Declaration(name, f"its declaration is not understood ({' '.join(words)})", None)
    annotation = annotation[1:]
    if annotation[:1] == [".global"]:
        annotation = annotation[1:]
    if not annotation:
        return _Declaration(name, None, None)
    if annotation[0] != ".align" or len(annotation) != 2:
        return _Declaration(name, f"it points to {annotation[0]} memory", None)
    return _Declaration(name, None, tokens[-2])


def _use_refusal(uses: Sequence[int], body: Sequence[_Token]) -> str | None:
    """Return why the parameter used at these places of the body cannot be dereferenced; None if it can."""
    for position in uses:
        around = [token.text for token in body[max(position - 4, 0) : position + 3]]
        shown = " ".join(around)
        if len(around) != 7 or around[2:4] != [",", "["] or around[5:] != ["]", ";"]:
            return f"it is used other than by a plain load ({shown})"
        if around[0] not in PLAIN_LOADS or not around[1].startswith("%"):
            return f"it is loaded other than as one 64-bit word ({shown})"
        guard = [token.text for token in body[max(position - 6, 0) : position - 4]]
        if len(guard) == 2 and guard[0] in ("@", "!") and guard[1].startswith("%"):
            return f"its load is predicated ({''.join(guard)} {shown})"
    if len(uses) > 1:
        return f"it is loaded {len(uses)} times"
    return None


TIMEOUT_S = 300
BLACKWELL = 100
"""From this compute capability (10.0) on, Triton assembles with a `ptxas` of its own for it."""


class PtxasMissing(RuntimeError):
    """There is no `ptxas`; the message says where one was looked for."""


class PtxasFailed(RuntimeError):
    """`ptxas` refused its input; the message holds what it said."""


def find_ptxas(target: str) -> Path:
    """Return the `ptxas` Triton uses for `target` (`sm_90a`).

    Raises:
        PtxasMissing: Triton has none.
    """
    from triton import knobs

    match = re.fullmatch(r"sm_(\d+)[af]?", target)
    if match is None:
        raise PtxasFailed(f"{target!r} is not a target of ptxas; targets look like sm_80 or sm_90a")
    try:
        tool = knobs.nvidia.ptxas_blackwell if int(match.group(1)) >= BLACKWELL else knobs.nvidia.ptxas
        return Path(tool.path)
    except RuntimeError as error:
        raise PtxasMissing(
            f"Triton has no ptxas for {target} ({error}); reinstall triton, or set TRITON_PTXAS_PATH"
        ) from error


def assemble(
    ptx: str,
    kernel: PtxKernel,
    *,
    cache: CompiledCache,
    options: Sequence[str] = (),
    ptxas: Path | None = None,
) -> Compiled:
    """Return the cubin of `ptx` for the target it names, from the cache or by `ptxas`.

    Args:
        kernel: an entry of `ptx` (`read_kernel`), which names the target.
        options: further options of ptxas; a kernel Triton compiled without fused multiply-add needs `--fmad=false`.
        ptxas: the assembler, by default the one Triton uses for the target.

    Raises:
        PtxasMissing: there is no assembler.
        PtxasFailed: it refused the PTX, the target or an option, or did not end in `TIMEOUT_S` seconds.
    """
    tool = ptxas or find_ptxas(kernel.target)
    key = ("ptxas", ptx, kernel.target, ptxas_version(tool), *options)
    return cache.get_or_build(key, lambda: _run(tool, ptx, kernel.target, options))


@functools.cache
def ptxas_version(ptxas: Path) -> str:
    """Return what `ptxas --version` prints.

    Raises:
        PtxasMissing: the file cannot be run.
    """
    try:
        return subprocess.run(
            [ptxas, "--version"], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise PtxasMissing(f"{ptxas} cannot be run ({error}); reinstall triton, or set TRITON_PTXAS_PATH") from error


def _run(ptxas: Path, ptx: str, target: str, options: Sequence[str]) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="encore-ptxas-") as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        command = [str(ptxas), "-v", f"--gpu-name={target}", *options, str(source), "-o", str(cubin)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        except OSError as error:
            raise PtxasMissing(f"{ptxas} cannot be run ({error}); reinstall triton") from error
        except subprocess.TimeoutExpired as error:
            raise PtxasFailed(f"ptxas for {target} did not end in {TIMEOUT_S} s") from error
        said = done.stdout + done.stderr
        if done.returncode != 0:
            raise PtxasFailed(f"ptxas for {target} ended with {done.returncode}: {said.strip()}")
        return Compiled(cubin.read_bytes(), said)


@dataclass(frozen=True, slots=True)
class PtxNode(PlannedNode):
    """Describe a node that launches the rewritten kernel: each parameter listed takes the address of its slot."""

    parameters: tuple[tuple[int, Slot], ...]

    @property
    def through_table(self) -> bool:
        return True


class Ptx:
    """Make nodes launch a variant of their Triton kernel that reads its pointers from the table itself."""

    stand_ins: Sequence[Choice] = (Choice.PRELUDE, Choice.HOST)

    def refusal(self, use: PointerUse, available: Available) -> str | None:
        if use.kind is not UseKind.PARAMETER:
            return "only pointer parameters of kernels can be dereferenced"
        if use.node not in available.ptx:
            return "no PTX of this kernel is available"
        if use.byte_offset:
            return f"the pointer lies {use.byte_offset} bytes into parameter {use.parameter}"
        refusals = available.ptx[use.node]
        if not refusals:
            return "the PTX of this kernel cannot be read or is not understood"
        if use.parameter >= len(refusals):
            return f"its PTX has {len(refusals)} parameters only, so it is of another kernel"
        return refusals[use.parameter]

    def planned(self, record: Node, node: PlannedNode, slots: Slots) -> PlannedNode:
        parameters = tuple((use.parameter, slots.slot(use.input, use.delta)) for use in node.uses)
        return PtxNode(node.node, node.applier, node.uses, parameters)

    def unavailable(self, gpu: ApplierGpu) -> str | None:
        return gpu.table_refusal()

    def attach(
        self, target: EditableGraph, nodes: Sequence[PlannedNode], table_address: int, tools: ApplierTools
    ) -> Attached:
        for node in nodes:
            assert isinstance(node, PtxNode)
            replaced = [parameter for parameter, _ in node.parameters]
            function = tools.rewritten_function(replaced, target.kernel(node.node))
            _substitute(target, node, function, table_address)
        return Attached()


APPLIER = Ptx()


def _substitute(target: EditableGraph, node: PtxNode, function: Any, table_address: int) -> None:
    """Make `node` launch `function`, each indirected parameter holding the address of its slot.

    Call it before the graph is instantiated. Everything else of the launch stays as captured, attributes included.
    """
    record = target.kernel(node.node)
    handle = target.handle(node.node)
    arguments = LaunchParameters([parameter.data for parameter in record.parameters])
    for parameter, slot in node.parameters:
        arguments.write(parameter, 0, pointer(table_address + slot.offset_bytes))
    launch = check(target.driver.cuGraphKernelNodeGetParams, handle)
    launch.func = function
    launch.kern = target.driver.CUkernel(0)
    launch.kernelParams = arguments.address
    launch.extra = 0
    check(target.driver.cuGraphKernelNodeSetParams, handle, launch)
