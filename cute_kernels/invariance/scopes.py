"""Who decides about an operator: the block of a thread that began last, or else the process.

A thread's blocks are kept in at::ThreadLocalState, which autograd hands to the threads of a backward. Python's own
thread-local variables do not reach them.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, get_args

import torch
from torch._C import _get_obj_in_tls, _is_key_in_tls, _stash_obj_in_tls

from cute_kernels.invariance import errors

Mode = Literal["strict", "warn", "off"]
MODES = get_args(Mode)
_KEY = "cute_kernels.batch_invariant"


class Block(Protocol):
    """A live block of a scope: its mode, and the operators that ran without being covered."""

    mode: Mode
    uncovered: Counter[str]


class Scope:
    """The live blocks of a thread and of its backward passes, in the order that they began; or the process's one."""

    def __init__(self) -> None:
        self.blocks: list[Any] = []

    @staticmethod
    def of_this_thread() -> Scope | None:
        return _get_obj_in_tls(_KEY) if _is_key_in_tls(_KEY) else None

    @staticmethod
    def made_for_this_thread() -> Scope:
        """That one, or a new one."""
        scope = Scope.of_this_thread()
        if scope is None:
            scope = Scope()
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(scope))  # torch 2.11 takes a reference that it is not given
            _stash_obj_in_tls(_KEY, scope)
        return scope

    def is_on(self) -> bool:
        """Whether the block that decides replaces anything."""
        last = self.blocks[-1:]  # another thread may end the last one
        return bool(last) and last[0].mode != "off"

    def count(self, name: str, arguments: tuple[Any, ...], reason: str = "") -> None:
        """Count an operator that is not covered in all live blocks, or raise as the one that decides says."""
        live = list(self.blocks)
        if live[-1].mode == "strict":
            raise errors.uncovered(name, arguments, reason)
        for block in live:
            block.uncovered[name] += 1
        if live[-1].uncovered[name] == 1:
            place = errors.caller()
            message = f"batch_invariant: {name} is not covered: its bits may depend on the batch"
            warnings.warn_explicit(
                f"{message}; {reason}" if reason else message, UserWarning, place.file or "backward", place.line or 1
            )


class _Thread(threading.local):
    """Whether this thread is inside of a kernel that replaces an operator: its own operators run as they are."""

    inside = False


thread = _Thread()
process = Scope()
collectives = "refuse"  # of the process: what becomes of those that add over ranks
_live = 0  # blocks, of all threads
_lock = threading.RLock()  # a generator that is collected ends its block at any place
_on: set[Scope] = set()
_stance = None  # ours of torch.compile; it knows the user's


def deciding() -> Scope | None:
    """The scope that decides about an operator of this thread; None: it runs as torch has it."""
    if thread.inside:
        return None
    if _live and _is_key_in_tls(_KEY):
        scope = _get_obj_in_tls(_KEY)
        if scope.blocks:
            return scope if scope.is_on() else None
    return process if process.blocks else None


@contextmanager
def inside() -> Iterator[None]:
    """Operators run as torch has them."""
    before, thread.inside = thread.inside, True
    try:
        yield
    finally:
        thread.inside = before


def live_blocks() -> int:
    """The number of live blocks in all threads."""
    return _live


def add(scope: Scope, block: Block) -> None:
    """One more live block, which decides from here on. torch refuses it inside of a compiled function."""
    _change(scope, lambda: scope.blocks.append(block))


def remove(scope: Scope, block: Block) -> list[Block]:
    """One less; gives those that began after it."""
    later = scope.blocks[scope.blocks.index(block) + 1 :]
    _change(scope, lambda: scope.blocks.remove(block))
    return later


def _change(scope: Scope, change: Callable[[], None]) -> None:
    global _live
    with _lock:
        before = list(scope.blocks)
        change()
        try:
            _update_stance(scope)
        except BaseException:
            scope.blocks[:] = before
            _update_stance(scope)
            raise
        if scope is not process:
            _live += len(scope.blocks) - len(before)


def _update_stance(scope: Scope) -> None:
    """torch.compile's, of which a process has one: functions go to our backend while any scope replaces."""
    global _stance
    (_on.add if scope.is_on() else _on.discard)(scope)
    backend = None
    if _on:
        backend = _refusing_backend if any(s.blocks[-1].mode == "strict" for s in _on) else _warning_backend
    if _stance is not None:
        if backend is not None and _stance.stance.backend is backend:
            return
        if torch._dynamo.eval_frame._stance is _stance.stance:  # else others have set one meanwhile
            _stance.__exit__(None, None, None)
        _stance = None
    if backend is not None:
        _stance = torch.compiler.set_stance("default", force_backend=backend)  # raises inside of a compiled function


# Two functions, since torch keeps what is compiled by the backend that compiled it


def _refusing_backend(graph: Any, example_inputs: Any, **options: Any) -> Any:
    from cute_kernels.invariance import compiled  # takes seconds, and is not wanted by each block

    return compiled.forced(graph, example_inputs, strict=True)


def _warning_backend(graph: Any, example_inputs: Any, **options: Any) -> Any:
    from cute_kernels.invariance import compiled

    return compiled.forced(graph, example_inputs, strict=False)
