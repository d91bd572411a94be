"""install: batch-invariant kernels under torch's operators for the whole process; and what a block needs of it."""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from typing import Literal, get_args

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from cute_kernels.invariance import scopes
from cute_kernels.invariance.registration import Owner, Registration
from cute_kernels.invariance.scopes import Mode
from cute_kernels.runtime.checks import expect

Collectives = Literal["refuse", "pinned", "ordered"]
COLLECTIVES = get_args(Collectives)
# With these NCCL adds over ranks in one order, whatever a message's size; read when a process group is made
PINNED = {
    "NCCL_LAUNCH_MODE": "GROUP",
    "NCCL_COLLNET_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_P2P_NET_DISABLE": "1",
    "NCCL_MIN_NCHANNELS": "1",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_PROTO": "Simple",
    "NCCL_ALGO": "allreduce:tree",
    "NCCL_NTHREADS": "1",
    "NCCL_SOCKET_NTHREADS": "1",
}
_lock = threading.RLock()
_registration: Registration | None = None
_warned_of_cpu = False  # once a process


class _Installed:
    """The block that decides in threads without a block of their own."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.uncovered: Counter[str] = Counter()


def install(mode: Literal["strict", "warn"] = "strict", *, collectives: Collectives = "refuse") -> Counter[str]:
    """As ``batch_invariant``, but for the whole process: all threads, backward passes whenever they start.

    A block of ``batch_invariant`` decides inside of it, "off" included. Called again, it sets mode and collectives
    anew. Call it when the libraries whose operators you use are imported: those that they register later are not
    seen. No other thread should run operators meanwhile.

    Args:
        mode: the treatment of operators that are not covered. "strict": an error. "warn": they run, with a warning at
            the first call.
        collectives: the treatment of those that add over ranks, of floating-point tensors.

            - "refuse": as any other operator that is not covered.
            - "ordered": an all-reduce or a reduce-scatter, of a sum or a mean, adds in fp32 (fp64 of fp64) from the
              group's rank 0 on, and rounds once. An element has the same bits whatever the size of the message, the
              bucket, the backend and the timing; they depend on the number of ranks. It moves a ring's bytes, in the
              stream that calls, and needs up to three times the message's memory meanwhile. Maxima and minima run as
              they are. Products, scaled sums and ``reduce`` to one rank stay refused.
            - "pinned": they run, since NCCL's variables are set so that it adds in one order; bits depend on the number
              of ranks, too. All of NCCL_LAUNCH_MODE=GROUP, NCCL_COLLNET_ENABLE=0, NCCL_NVLS_ENABLE=0,
              NCCL_P2P_NET_DISABLE=1, NCCL_MIN_NCHANNELS=1, NCCL_MAX_NCHANNELS=1, NCCL_PROTO=Simple,
              NCCL_ALGO=allreduce:tree, NCCL_NTHREADS=1 and NCCL_SOCKET_NTHREADS=1 must be in the environment before a
              process group is made.

    Returns:
        A Counter, name of the operator -> calls: those that were not covered and ran in threads without a block.

    Raises:
        ValueError: no such mode or policy; "pinned", and a variable of NCCL's is not set as it must be.
        RuntimeError: inside of a compiled function; in strict mode, another library has registered its kernel under
            one of torch's operators (named; in mode "warn" a warning: ours runs), or since then over ours; torch is too
            old.

    Example:
        >>> from cute_kernels import install, is_installed, uninstall
        >>> uncovered = install("warn")
        >>> is_installed()
        True
        >>> uninstall()
        >>> is_installed()
        False
    """
    _expect_eager("install")
    expect(mode in ("strict", "warn"), "install", "mode", "be of strict, warn", repr(mode))
    expected = f"be of {', '.join(COLLECTIVES)}"
    expect(collectives in COLLECTIVES, "install", "collectives", expected, repr(collectives))
    if collectives == "pinned":
        wrong = {name: value for name, value in PINNED.items() if os.environ.get(name, "").lower() != value.lower()}
        expected = "find NCCL's variables set, before a process group is made: "
        expected += " ".join(f"{name}={value}" for name, value in wrong.items())
        expect(not wrong, "install", "collectives='pinned'", expected, "other values, or none")
    with _lock:
        register("install", mode)
        if _registration is not None:
            _report("install", mode, "over this library's", _registration.overtaken(), "theirs run")
        block = _Installed(mode)
        before = list(scopes.process.blocks)
        scopes.add(scopes.process, block)
        for other in before:
            scopes.remove(scopes.process, other)
        scopes.collectives = collectives
        return block.uncovered


def uninstall() -> None:
    """Ends ``install``, and removes the kernels from torch's dispatcher: its own run again, at their own host time.

    Without ``install`` it removes those that a block has registered. The next block registers them again.

    Returns:
        None.

    Raises:
        RuntimeError: a block of ``batch_invariant`` is live, in any thread; inside of a compiled function.

    Example:
        >>> from cute_kernels import install, uninstall
        >>> counter = install()
        >>> uninstall()
    """
    global _registration
    _expect_eager("uninstall")
    with _lock:
        if scopes.live_blocks():
            raise RuntimeError("uninstall: a block of batch_invariant is live; end it first")
        for block in list(scopes.process.blocks):
            scopes.remove(scopes.process, block)
        scopes.collectives = "refuse"
        if _registration is not None:
            _registration.remove()
            _registration = None


def _expect_eager(function: str) -> None:
    """Raise RuntimeError inside of a compiled function, also where its graph breaks: torch's stance is fixed there."""
    if torch.compiler.is_compiling() or get_eval_frame_callback() not in (None, False):
        raise RuntimeError(f"{function}: call it outside of a compiled function")


def is_installed() -> bool:
    """Whether ``install`` holds for the process.

    Returns:
        True from ``install`` to ``uninstall``; blocks do not count.

    Example:
        >>> from cute_kernels import is_installed
        >>> is_installed()
        False
    """
    return bool(scopes.process.blocks)


def register(function: str, mode: Mode) -> None:
    """Registers the kernels, once; says who else has one under an operator that is replaced."""
    global _registration
    if _registration is not None:
        return
    with _lock:
        if _registration is not None:
            return
        if not has_device():
            _warn_of_cpu(function)
            return
        made = make_registration()
        _report(function, mode, "under torch's operators", made.owners, "this library's run in their place")
        made.register()
        _registration = made


def _report(function: str, mode: Mode, where: str, owners: list[Owner], consequence: str) -> None:
    """An error in strict mode, a warning else, that names who else has registered kernels."""
    if not owners:
        return
    named = ", ".join(sorted({str(owner) for owner in owners}))
    text = f"{function}: other libraries have registered kernels {where}: {named}"
    if mode == "strict":
        raise RuntimeError(f"{text}; remove them, or take the mode 'warn': then {consequence}")
    warnings.warn(f"{text}; {consequence}", stacklevel=4)


def has_device() -> bool:
    """Whether tensors may be on a GPU. Tests put the CPU in its place."""
    return bool(torch.cuda.device_count())


def make_registration() -> Registration:
    """The registration for CUDA's operators. Tests put one for the CPU's in its place."""
    return Registration()


def _warn_of_cpu(function: str) -> None:
    """Once: without a CUDA device nothing changes."""
    global _warned_of_cpu
    if not _warned_of_cpu:
        _warned_of_cpu = True
        warnings.warn(
            f"{function}: there is no CUDA device, and tensors on the CPU are left to torch's own operators, whose "
            "bits may depend on the batch: here it changes nothing",
            stacklevel=4,
        )
