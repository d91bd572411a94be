"""Matrices of rows and gradients, as all families treat them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.compiler import is_compiling, is_dynamo_compiling

from cute_kernels.runtime.checks import expect, expect_tensor


@functools.cache
def eager_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without torch's wrapper."""
    return super(torch.autograd.Function, function).apply


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply``; in eager mode past torch's wrapper in Python, which functorch and Dynamo alone need.

    The wrapper takes 5 us of 24 that layer_norm takes with autograd (CPU).
    """
    if is_dynamo_compiling() or _are_functorch_transforms_active():
        return function.apply(*arguments)
    return eager_apply(function)(*arguments)


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward through which no second derivative goes: refused where autograd would keep a graph of it.

    torch's own ``once_differentiable`` raises where an incoming gradient requires one itself. After a ``sum`` none
    does, and what the backward finds would count as a constant.

    Raises:
        RuntimeError: in the backward; create_graph=True.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled() and not is_compiling():
            name = backward.__qualname__.removesuffix(".backward").strip("_")
            raise RuntimeError(f"{backward.__module__}: {name} has no second derivative, got create_graph=True")
        return backward(ctx, *gradients)

    return checked


def as_rows(op: str, name: str, t: Tensor) -> Tensor:
    """``t`` as a matrix of rows, without a copy.

    Raises:
        TypeError, ValueError: it has no strides, or leading dimensions that do not collapse to rows of one stride.
    """
    if t.dim() == 2:
        return t
    try:
        return t.view(-1, t.shape[-1]) if t.numel() else t.reshape(t.shape[:-1].numel(), t.shape[-1])
    except RuntimeError:
        expect_tensor(op, name, t)
        expected = "have leading dimensions that collapse to rows of one stride"
        expect(False, op, name, expected, f"shape {tuple(t.shape)}, strides {t.stride()}")
        raise


def gradient_rows(t: Tensor, eager: bool) -> Tensor:
    """An incoming gradient as a matrix of rows; copied if its layout is not one (an expanded scalar, say).

    ``eager``: of the backward's mode. In a trace the layout is not known yet.
    """
    is_matrix = eager and t.dim() == 2 and t.stride(-1) == 1 and t.stride(0) >= t.shape[1]
    if not is_matrix and not (eager and t.is_contiguous()):
        t = t.contiguous()
    return t if t.dim() == 2 else t.reshape(t.shape[:-1].numel(), t.shape[-1])


def needs_gradient(needed: bool, parameter: Tensor | None, main_grad: Tensor | None) -> bool:
    """Whether the backward that runs is to find the gradient of a parameter; ``needed``: as the forward knew it.

    ``torch.autograd.grad`` of other tensors alone must leave a main_grad as it is. What goes through autograd it drops.
    A compiled backward is not told what it is asked for: it finds every gradient, and adds to every main_grad.
    """
    if not needed or main_grad is None or is_compiling():
        return needed
    if not _leaf(parameter).requires_grad:  # since the forward: autograd would drop it, too
        return False
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # says that autograd.grad was asked for this very parameter
        return True


def _leaf(saved: Tensor) -> Tensor:
    """The parameter that a saved tensor was, or was cast of. By the graph: where hooks unpack what was saved
    (checkpointing, save_on_cpu) another tensor comes back, with that place in it and no attributes.
    """
    node: Any = get_gradient_edge(saved).node if saved.requires_grad else None
    if type(node).__name__ == "ToCopyBackward0":
        node = node.next_functions[0][0]
    return node.variable if type(node).__name__ == "AccumulateGrad" else saved


def gradient_buffer(op: str, name: str, parameter: Tensor, main_grad: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(what the kernel writes, what autograd gets): a main_grad is accumulated into, and autograd gets None.

    ``main_grad``: as the forward knew it; that of the parameter, or of what it was cast of, may be another one by now.
    A hook of ``register_hook`` would get None. Those of ``register_post_accumulate_grad_hook`` and of the node
    AccumulateGrad run as ever: training systems have them beside a main_grad.

    Raises:
        TypeError: the main_grad is no tensor.
        ValueError: the main_grad is not contiguous fp32 of the parameter's shape on its device, or the parameter has a
            hook of ``register_hook``. A trace does not see the hook.
    """
    hooks = None
    if main_grad is not None and not is_compiling():
        leaf = _leaf(parameter)
        main_grad, hooks = getattr(leaf, "main_grad", main_grad), leaf._backward_hooks
    if main_grad is None:
        gradient = torch.empty(*parameter.shape, dtype=parameter.dtype, device=parameter.device)
        return gradient, gradient
    if not isinstance(main_grad, Tensor):
        expect_tensor(op, f"{name}.main_grad", main_grad)
    if hooks:
        expected = "be of a parameter without tensor hooks, since its gradient does not go through autograd"
        expect(False, op, f"{name}.main_grad", expected, f"{len(hooks)} of register_hook")
    good = main_grad.shape == parameter.shape and main_grad.dtype == torch.float32 and main_grad.is_contiguous()
    got = f"{main_grad.dtype} of shape {tuple(main_grad.shape)}, strides {main_grad.stride()}"
    expect(good, op, f"{name}.main_grad", f"be contiguous float32 of shape {tuple(parameter.shape)}", got)
    expect(main_grad.device == parameter.device, op, f"{name}.main_grad", f"be on {parameter.device}", main_grad.device)
    if not is_compiling():
        expect(not main_grad.is_neg(), op, f"{name}.main_grad", "hold its values in memory", "a view negated lazily")
        increment_version(main_grad)  # as torch's own operators in place do; a kernel does not
    return main_grad, None


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t.to(dtype)``, without a call of it where t has that dtype: for what a forward returns, as ``moved``.

    torch.compile of torch 2.11 makes results of all tensors that a forward makes. One that two operators return, since
    ``to`` and ``contiguous`` may return what they are given, is there twice: its gradient arrives at the second place,
    and the first, the forward's own result, gets zeros.
    """
    return t if t.dtype is dtype else t.to(dtype)


def moved(t: Tensor, source: int, to: int) -> Tensor:
    """``t.movedim(source, to)``, contiguous: t itself where the dimension stays, else another tensor."""
    if source % max(t.dim(), 1) == to % max(t.dim(), 1):
        return t
    return t.movedim(source, to).clone(memory_format=torch.contiguous_format)


def autocasts(t: Tensor) -> bool:
    """Whether autocast is on for tensors on this one's device; of the meta device it never is."""
    kind = t.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def without_autocast(t: Tensor) -> contextlib.AbstractContextManager:
    """Products of tensors on this one's device are in the dtype of their factors: for the references."""
    kind = t.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else contextlib.nullcontext()


def widened(op: str, name: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """``parameter.to(dtype)``, for the references; a gradient is added to ``parameter.main_grad`` if that exists.

    Raises:
        ValueError: in the backward, as ``gradient_buffer``.
    """
    if getattr(parameter, "main_grad", None) is None:
        return parameter.to(dtype)
    return _IntoMainGrad.apply(parameter, op, name, dtype)


class _IntoMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter, op, name, dtype):
        ctx.save_for_backward(parameter)
        ctx.call = op, name, parameter.main_grad
        return parameter.to(dtype, copy=True)

    @staticmethod
    @first_derivative_only
    def backward(ctx, gradient):
        op, name, main_grad = ctx.call
        (parameter,) = ctx.saved_tensors
        if needs_gradient(True, parameter, main_grad):
            buffer, result = gradient_buffer(op, name, parameter, main_grad)
            if result is None:
                buffer.add_(gradient)
            else:  # it has none any more
                return buffer.copy_(gradient), None, None, None
        return None, None, None, None
