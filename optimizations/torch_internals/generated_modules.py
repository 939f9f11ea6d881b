"""Call back around the generated modules that a process loads, one for each graph that Inductor compiles.

A module calls `AsyncCompile.triton(self, kernel_name, source_code, device_str="cuda")` for each of its Triton kernels,
which compiles the kernel or finds it in a cache, and `AsyncCompile.wait(self, scope)` once after them, whether it has
kernels or not. With a pool of compilers the former is called before as well, while the code is generated.
`PyCodeCache.modules` lists the modules that are loaded. `PyCodeCache.stack_frames_for_code(path, line)` returns the
frames of the program behind a line of one, innermost first, as dictionaries with "filename", "line" and "name"; None
where it does not know them.
`compilation_callbacks.register_start_callback(callback)` calls back when a compilation begins, that of a backward too,
and not for one that begins inside of another. Checked on PyTorch 2.11.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from optimizations import torch_internals
from optimizations.stack_trace import Frame, frame_of_program
from optimizations.torch_internals.replacing import Replacing


@contextlib.contextmanager
def before_kernels(wait: Callable[[int], None]) -> Iterator[None]:
    """Call `wait` before the first Triton kernel of each generated module in the block, with how many modules were
    loaded in the block before it."""
    loaded, waited = 0, -1

    def compiling(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def triton(*args: Any, **kwargs: Any) -> Any:
            nonlocal waited
            if waited < loaded:
                waited = loaded
                wait(loaded)
            return original(*args, **kwargs)

        return triton

    def count() -> None:
        nonlocal loaded
        loaded += 1

    with Replacing({"compile_triton_kernel": compiling, "wait_for_kernels": _followed_by(count)}):
        yield


@contextlib.contextmanager
def when_launched(launched: Callable[[int], None]) -> Iterator[None]:
    """Call `launched` whenever a compilation begins in the block, with how many generated modules were loaded in it.

    The program has called these before it needs another one, unless they were compiled together.
    """
    loaded = 0

    def count() -> None:
        nonlocal loaded
        loaded += 1

    def begins(arguments: Any) -> None:
        launched(loaded)

    handler: Any = torch_internals.compilation_callbacks
    handler.register_start_callback(begins)
    try:
        with Replacing({"wait_for_kernels": _followed_by(count)}):
            yield
    finally:
        with contextlib.suppress(ValueError):  # `torch.compiler.reset` forgets all of them
            handler.remove_start_callback(begins)


def loaded_modules() -> list[dict[str, Any]]:
    """Return the globals of all generated modules that are loaded; none where nothing was compiled."""
    if "torch._inductor.codecache" not in sys.modules:
        return []
    return [vars(module) for module in torch_internals.PyCodeCache.modules]


def source_line(path: str, line: int) -> str | None:
    """Return the program's line that a line of a generated module comes from; None where PyTorch does not know it."""
    try:
        found = torch_internals.PyCodeCache.stack_frames_for_code(path, line) or []
        frames = [Frame(str(one["filename"]), int(one["line"]), str(one["name"]), "") for one in reversed(found)]
    except (AttributeError, KeyError, TypeError, ValueError):  # it is for reports only
        return None
    frame = frame_of_program(frames)
    return None if frame is None else str(frame)


def _followed_by(then: Callable[[], None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            then()
            return result

        return wait

    return made
