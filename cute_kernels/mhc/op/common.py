"""What the hyper-connections' operators share: choice of backend, checks, matrices of tokens, autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from cute_kernels.mhc import launch
from cute_kernels.mhc.checks import as_tokens
from cute_kernels.runtime.autograd import eager_apply
from cute_kernels.runtime.checks import expect
from cute_kernels.runtime.operators import is_plain

MAX_PASSED = 4096  # signatures, numbers of tokens and all: those of old batches are forgotten

_passed: set[tuple] = set()


def takes_reference(op: str, x: Tensor, backend: str | None) -> bool:
    """Whether plain torch computes: told so, or not on a GPU.

    Raises:
        ValueError: no such backend.
    """
    expect(backend in (None, "reference"), op, "backend", "be None or 'reference'", repr(backend))
    return backend is not None or not isinstance(x, Tensor) or not on_gpu(x)


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def checked(check: Callable[..., None], *arguments: Any, op: str | None = None) -> None:
    """``check(*arguments)``, unless arguments of these shapes, strides and dtypes have passed it."""
    options = {} if op is None else {"op": op}
    if not is_plain(arguments[0]):
        check(*arguments, **options)
        return
    try:
        key = (
            check,
            *[(a.shape, a.stride(), a.dtype, a.device) if isinstance(a, Tensor) else (type(a), a) for a in arguments],
        )
        if key in _passed:
            return
    except (RuntimeError, TypeError):  # a tensor without strides, an argument that cannot be part of a key
        key = None
    check(*arguments, **options)
    if key is not None:
        if len(_passed) >= MAX_PASSED:
            _passed.clear()
        _passed.add(key)


def recall(facts: tuple, *tensors: Tensor | None) -> tuple[tuple | None, Any]:
    """(key, what ``remember`` was given of an eager call alike, if anything was); no key: nothing is to be remembered.

    ``facts``: all that the call depends on beside the tensors.
    """
    if is_dynamo_compiling():
        return None, None
    try:
        key = (*facts, torch.is_grad_enabled(), *[None if t is None else t.shape for t in tensors])
        return key, launch.calls.find(key, *[t for t in tensors if t is not None])
    except (AttributeError, RuntimeError):  # no tensor, or one that has no sizes
        return None, None


def is_known(key: tuple | None, *tensors: Tensor | None) -> bool:
    """Whether such a call came before, on tensors whose memory a kernel may read as it is: it is worth a plan."""
    return key is not None and _is_simple(*tensors) and launch.calls.takes(key, *tensors)


def _is_simple(*tensors: Tensor | None) -> bool:
    return is_plain(*tensors) and not any(t is not None and t.is_neg() for t in tensors)


def remember(key: tuple | None, found: Any, *tensors: Tensor | None) -> None:
    """Of a call on plain tensors that succeeded, whose key ``recall`` gave; ``found``: None unless it was known."""
    if key is not None and _is_simple(*tensors):
        launch.calls.remember(key, found, *tensors)


def differentiates(*tensors: Tensor | None) -> bool:
    """Whether a gradient of one of them is wanted, or a tangent might be, which autograd refuses."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return forward_ad._current_level >= 0


def apply(function: type[torch.autograd.Function], first: Tensor, *rest: Any) -> Any:
    return (eager_apply(function) if is_plain(first) else function.apply)(first, *rest)


def rows(op: str, name: str, t: Tensor, width: int) -> Tensor:
    """``t`` as a matrix of ``width`` numbers a token, without a copy, but of what torch negates when it reads it.

    Raises:
        ValueError: its tokens do not collapse to rows of one stride, or are more than 32 bits count.
    """
    matrix = as_tokens(op, name, t, width)
    return matrix if width > 1 else _numbers(matrix)


def gradient_rows(t: Tensor | None, width: int) -> Tensor | None:
    """An incoming gradient as a matrix of ``width`` numbers a token; copied if its tokens have no one stride."""
    if t is None:
        return None
    if not t.is_contiguous():
        if is_plain(t):
            try:
                matrix = t.view(-1, width)
            except RuntimeError:
                pass
            else:
                if matrix.stride(1) == 1 and matrix.stride(0) >= width:
                    return matrix
        t = t.contiguous()
    matrix = t.view(-1, width)
    return matrix if width > 1 else _numbers(matrix)


def _numbers(matrix: Tensor) -> Tensor:
    """A number a token: its dimension of one element may have any stride, and has not 1 where torch negates it."""
    if matrix.stride(1) == 1:
        return matrix
    matrix = matrix.resolve_neg()
    return matrix.as_strided(matrix.shape, (matrix.stride(0), 1))


def empty_like(t: Tensor, wanted: bool = True) -> Tensor | None:
    """Room for a gradient of ``t``, contiguous."""
    return torch.empty(t.shape, dtype=t.dtype, device=t.device) if wanted else None


def matrix_of(t: Tensor | None, width: int) -> Tensor | None:
    """A contiguous tensor of our own as a matrix of tokens."""
    return None if t is None else t.view(-1, width)
