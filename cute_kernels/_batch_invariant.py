"""batch_invariant: torch's own operators run batch-invariant kernels inside a ``with`` block."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from cute_kernels import _aten
from cute_kernels._check import expect

MODES = ("strict", "warn", "off")
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


class UncoveredOperatorError(RuntimeError):
    """An operator that may sum in an order of the batch's, inside ``batch_invariant("strict")``."""


@contextmanager
def batch_invariant(mode: str = "strict") -> Iterator[Counter[str]]:
    """Inside, torch's operators on CUDA tensors give a row the same bits whatever the batch, forward and backward.

    Replaced by kernels of this library, where tensors are bf16, fp16 or (but for products) fp32: ``mm``, ``addmm``,
    ``bmm``, ``baddbmm``, ``mv``, ``dot`` and what decomposes into them (``linear``, ``matmul``, ``einsum``);
    ``softmax``, ``log_softmax``, ``sum``, ``mean``, ``nll_loss``, ``layer_norm``, ``rms_norm``; and their backwards.
    ``scaled_dot_product_attention`` consists of these under ``sdpa_kernel(SDPBackend.MATH)`` and
    ``torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)`` (else its products are of fp32). Left alone, since
    they add nothing up: elementwise operators, views, copies, indexing, maxima, sorting, collectives that only move
    data. Tensors on the CPU are left alone, too.

    Args:
        mode: what becomes of any other operator on floating-point CUDA tensors. "strict": an error. "warn": it runs,
            with a warning at its first call. "off": nothing is replaced, also inside of another block.

    Yields:
        A Counter of the operators that were not covered: name of the operator -> calls.

    Raises:
        ValueError: mode is none of these.
        UncoveredOperatorError: in the block, in strict mode.

    The innermost block decides; when it ends, by an exception, too, the one around it goes on. A block is of one thread
    and of the backward passes that it starts: one that starts later, recomputation of checkpoints with it, runs torch's
    own kernels. Functions of ``torch.compile`` run eagerly inside, and in every other thread meanwhile (the backward of
    what was compiled and run before does not); torch refuses a block inside of one. Each operator costs host time of
    Python's: capture a CUDA graph inside.

    The bits of a sum depend on its length: what is padded along a dimension that is summed over, such as the keys of
    attention, may change them. In gradients of parameters the batch itself is summed over: reproducible, in an order of
    its size. Left to torch: random numbers, which depend on the place in a batch, and which of equal values ``topk``
    and ``sort`` name.
    """
    expect(mode in MODES, "batch_invariant", "mode", f"be of {', '.join(MODES)}", repr(mode))
    uncovered: Counter[str] = Counter()
    outer = [m for m in _get_current_dispatch_mode_stack() if isinstance(m, _Replacing)]
    replacing = outer[-1] if outer else _Replacing()
    more = (mode != "off") - replacing.is_on()
    _eager.count(more)
    replacing.levels.append((mode, uncovered))
    try:
        if outer:
            yield uncovered
        else:
            with replacing, _Functions(replacing):
                yield uncovered
    finally:
        replacing.levels.pop()
        _eager.count(-more)


class _Eager:
    """torch.compile's stance, of which a process has one: force_eager while any thread is in a block that replaces."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._stance = None  # ours; it knows the user's

    def count(self, more: int) -> None:
        """So many more threads are in such a block, or fewer."""
        with self._lock:
            threads = self._threads + more
            if threads and self._stance is None:
                self._stance = torch.compiler.set_stance("force_eager")  # raises inside of a compiled function
            elif not threads and self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None
            self._threads = threads


_eager = _Eager()


class _Replacing(TorchDispatchMode):
    """The one mode of a thread; ``levels``: (mode, uncovered) of the blocks that it is in, the innermost last."""

    def __init__(self) -> None:
        super().__init__()
        self.levels: list[tuple[str, Counter[str]]] = []

    def is_on(self) -> bool:
        """Whether the innermost block replaces anything."""
        return bool(self.levels) and self.levels[-1][0] != "off"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not _PLAIN.issuperset(types):  # tensors that wrap others: what is inside comes by itself
            return NotImplemented
        kwargs = kwargs or {}
        mode, uncovered = self.levels[-1]
        if mode == "off" or not _is_concerned(args, kwargs):
            return func(*args, **kwargs)
        replacement = _aten.replacement_of(func)
        if replacement is not None:
            result = replacement(*args, **kwargs)
            if result is not NotImplemented:
                return result
        elif _aten.adds_nothing_up(func, args, kwargs):
            return func(*args, **kwargs)
        else:
            with self:  # linear and matmul come whole under inference_mode
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        name = str(func)
        if mode == "strict":
            raise UncoveredOperatorError(
                f"batch_invariant: {name} of {', '.join(_signatures((*args, *kwargs.values())))} is not covered; "
                "batch_invariant('warn') lets it run"
            )
        uncovered[name] += 1
        if uncovered[name] == 1:
            warnings.warn(f"batch_invariant: {name} is not covered: its bits may depend on the batch", stacklevel=2)
        return func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    """What torch decides by strides before it calls an operator, in one way for all."""

    def __init__(self, replacing: _Replacing) -> None:
        super().__init__()
        self.replacing = replacing

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear and self.replacing.is_on() and _is_concerned(args, kwargs):
            return _linear(*args, **kwargs)
        return func(*args, **kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Product and bias rounded once, where torch rounds twice if x is no view of a matrix. A batch of one mostly is."""
    if bias is None or input.dim() < 3 or weight.dim() != 2:
        return F.linear(input, weight, bias)
    return torch.addmm(bias, input.flatten(0, -2), weight.t()).unflatten(0, input.shape[:-1])


def _is_concerned(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether floating-point numbers of CUDA tensors are computed with; integers may become such, by ``dtype``."""
    dtype = kwargs.get("dtype")
    converts = isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
    given = _tensors((*args, *kwargs.values()))
    return any(t.is_cuda and (converts or t.is_floating_point() or t.is_complex()) for t in given)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _signatures(values: Iterable[Any]) -> list[str]:
    return [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in _tensors(values)]
