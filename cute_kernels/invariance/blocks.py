"""batch_invariant: torch's own operators run batch-invariant kernels inside a ``with`` block."""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from cute_kernels.invariance import installation, scopes
from cute_kernels.invariance.scopes import MODES, Mode, Scope
from cute_kernels.runtime.checks import expect

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def batch_invariant(mode: Mode = "strict") -> _Block:
    """Inside, torch's operators on CUDA tensors give a row the same bits whatever the batch, forward and backward.

    Kernels of this library replace them where tensors are bf16, fp16 or fp32: ``mm``, ``addmm``, ``bmm``, ``baddbmm``,
    ``mv``, ``dot``, ``linear`` and what decomposes into them (``matmul``, ``einsum``); ``softmax``, ``log_softmax``,
    ``logsumexp``, ``sum``, ``nansum``, ``mean``, ``var``, ``cumsum``, ``trace``, norms, ``layer_norm``, ``rms_norm``;
    ``cross_entropy`` and the losses that are sums of elements (``mse_loss``, ``huber_loss``, ``binary_cross_entropy``
    and their like); additions by an index and the gradient of ``embedding``; ``sort`` and ``topk``; and their
    backwards.
    ``scaled_dot_product_attention`` runs ``attention`` without a mask, with ``is_causal`` where queries and keys are
    equally many, and with ``causal_lower_right``; so does ``varlen_attn``. Other masks and dropout are not
    covered. Under ``sdpa_kernel(SDPBackend.MATH)`` it consists of products and a softmax,
    with bits that depend on the number of keys; ``torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)`` keeps
    these in the dtype of the arguments. Left alone, since they reduce nothing: elementwise operators, views, copies,
    indexing, maxima, collectives that only move data. Tensors on the CPU are left alone, too: where there is no CUDA
    device, the first block warns, once a process.

    Args:
        mode: the treatment of any other operator on floating-point CUDA tensors. "strict": an error. "warn": it runs,
            with a warning at its first call. "off": nothing is replaced, also inside of another block, or of
            ``install``.

    Returns:
        A context manager and decorator. ``with`` gives a Counter, name of the operator -> calls: the operators that
        were not covered and ran while the block was live, also in a block within.

    Raises:
        ValueError: mode is none of these.
        TypeError: a decorated function is a generator function or async: the block would end before it runs.
        UncoveredOperatorError: in the block, in strict mode.
        RuntimeError: the block is live already; a block of another mode is live in another task of the thread; the
            block ends in another thread; the block ends before a weaker one that began later; in strict mode, another
            library has registered its kernel under an operator that is replaced; torch is too old.

    Numerics:
        The bits of a sum depend on its length: padding along a dimension that is summed over, such as the keys of
        attention, may change them. In gradients of parameters the batch itself is summed over: reproducible, in an
        order that its size fixes. Random numbers are left to torch, and depend on the place in a batch.

    A block holds for one thread and for the backward passes that it starts. A backward that starts later, recomputation
    of checkpoints with it, runs torch's own kernels: ``install`` covers these. A block is live from its begin to its
    end, by an exception, too. The live block of a thread that began last decides, so the innermost one. Blocks may end
    in any order, as those of two generators or asyncio tasks do: while a generator or task is suspended, its block goes
    on, and holds for all that the thread runs. Dispatch modes (``FlopCounterMode``, say) see torch's operators, not the
    kernels that replace them.

    The first block, or ``install``, registers the kernels with torch's dispatcher, for the whole process; they stay
    until ``uninstall``. An operator that is replaced costs some microseconds of Python then, also outside of blocks,
    where it is handed back to torch's kernel; elementwise operators, views and copies cost nothing. Kernels that
    another library registers later are not seen.

    Under ``torch.func.vmap`` torch makes several operators of some, which round in between: of ``linear`` with a bias,
    ``addmm``, ``addmv``, ``baddbmm``, ``nll_loss``, ``cross_entropy``, norms with weights of a batch and the backwards
    of norms. They are not covered there: give them the batch as a dimension. ``sum()``, ``mean()``, ``norm()`` and
    losses of each example become sums along dimensions: each has the same bits whatever the batch, others than without
    ``vmap``.

    Functions of ``torch.compile``, whatever their backend, are compiled by "cute_kernels" inside, and in every other
    thread meanwhile (the backward of a function that was compiled and run before is not); those of CPU tensors alone
    run as they are traced. torch refuses a block inside of one.

    Example:
        >>> import torch
        >>> from cute_kernels import batch_invariant
        >>> x = torch.ones(2, 4, device="cuda" if torch.cuda.is_available() else "cpu")
        >>> with batch_invariant("warn") as uncovered:
        ...     y = x.softmax(-1)
        >>> y.shape, sum(uncovered.values())
        (torch.Size([2, 4]), 0)
    """
    expect(mode in MODES, "batch_invariant", "mode", f"be of {', '.join(MODES)}", repr(mode))
    return _Block(mode)


class _Block:
    """One block: its mode, its counter, and while it is live the scope and the thread that it began in."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.uncovered: Counter[str] = Counter()
        self.scope: Scope | None = None
        self.thread = 0

    def __call__(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """Each call of the function is a block of its own."""
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        expected = "be no generator function and not async: the block would end before it runs; use ``with`` inside"
        good = not any(is_such(function) for is_such in kinds)
        expect(good, "batch_invariant", "the decorated function", expected, function, TypeError)

        @functools.wraps(function)
        def inside(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with _Block(self.mode):
                return function(*args, **kwargs)

        return inside

    def __enter__(self) -> Counter[str]:
        if self.scope is not None:
            raise RuntimeError("batch_invariant: a block that has not ended cannot begin again; make another one")
        if self.mode != "off":
            installation.register("batch_invariant", self.mode)
        scope = Scope.made_for_this_thread()
        self.thread = threading.get_ident()
        for other in scope.blocks:
            if other.thread == self.thread and other.mode != self.mode and other not in _begun.get():
                raise RuntimeError(
                    f"batch_invariant: a block of mode {self.mode!r} cannot begin: one of mode {other.mode!r} is live "
                    "in another task of this thread, for which it would decide, too"
                )
        scopes.add(scope, self)
        _begun.set((*_begun.get(), self))
        self.uncovered, self.scope = Counter(), scope
        return self.uncovered

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self.scope is None:
            raise RuntimeError("batch_invariant: a block that has not begun cannot end")
        later = scopes.remove(self.scope, self)
        self.scope = None
        _begun.set(tuple(block for block in _begun.get() if block is not self))
        if kind is not None:
            return
        if self.thread != threading.get_ident():
            raise RuntimeError(
                "batch_invariant: a block must end in the thread that it began in: elsewhere it covered nothing"
            )
        for other in later:
            if MODES.index(other.mode) > MODES.index(self.mode):
                raise RuntimeError(
                    f"batch_invariant: a block of mode {self.mode!r} ends before one of mode {other.mode!r} that began "
                    "later, and decided what ran since"
                )


# The live blocks that began in this context: a task sees those that were there when it was made, and its own
_begun: ContextVar[tuple[_Block, ...]] = ContextVar("batch_invariant", default=())
