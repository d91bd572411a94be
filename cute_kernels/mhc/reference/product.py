"""A product of matrices that autocast leaves alone."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.runtime.autograd import without_autocast


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of matrices, or of as many of both, in the dtype of its factors, and so its gradients."""
    return _Product.apply(a, b)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        with without_autocast(a):
            return a @ b

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        da = db = None
        with without_autocast(a):
            if ctx.needs_input_grad[0]:
                da = gradient @ b.mT
            if ctx.needs_input_grad[1]:
                db = a.mT @ gradient
        return da, db
