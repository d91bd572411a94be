"""A parameter in the dtype of the computation; its gradient goes where the kernels' goes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cute_kernels._autograd import gradient_buffer


def widened(op: str, name: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """``parameter.to(dtype)``; a gradient is added to ``parameter.main_grad`` if that exists.

    Raises:
        ValueError: in the backward; the main_grad is not contiguous fp32 of the parameter's shape on its device.
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
    @once_differentiable
    def backward(ctx, gradient):
        op, name, main_grad = ctx.call
        buffer, _ = gradient_buffer(op, name, *ctx.saved_tensors, main_grad)
        buffer.add_(gradient)
        return None, None, None, None
