"""Functions and modules with and without a fault, for the tests of invariance."""

import torch
from torch import Tensor, nn

from cute_kernels.invariance.checker import TRANSFORMS, Report

EVERY = tuple(TRANSFORMS)
ROWS = 130  # 100 + 30 and 128 fit


def batch(rows=ROWS, width=8, seed=1) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def row_sums(x: Tensor) -> Tensor:
    """Column by column: the order cannot depend on the number of rows."""
    total = torch.zeros_like(x[:, 0])
    for column in x.unbind(1):
        total = total + column
    return total


def squares(x: Tensor) -> Tensor:
    """Exact ops alone: torch's sigmoid or exp on a CPU rounds otherwise in a tensor's tail than in vectors of it."""
    return x * x + x


def failing(report: Report) -> set[str]:
    return {result.transform for result in report.results if result.status != "ok"}


class Faulty(nn.Module):
    """Adds the mean of the batch."""

    def forward(self, x):
        return x + x.mean(0)


class RowSums(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return row_sums(x * self.weight)[:, None] + x


class BackwardDependsOnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * (2 if len(dy) > 4 else 2.0000005)


class SumOfGradients(torch.autograd.Function):
    """Multiplies by the weight; how the weight's gradient is summed is the tests' to choose."""

    @staticmethod
    def forward(ctx, x, weight, sum_rows, main_grad):
        ctx.save_for_backward(x, weight)
        ctx.sum_rows, ctx.main_grad = sum_rows, main_grad
        return x * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dw = ctx.sum_rows(dy * x)
        if ctx.main_grad is not None:
            ctx.main_grad += dw
            dw = None
        return dy * weight, dw, None, None


class Scale(nn.Module):
    def __init__(self, sum_rows):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.sum_rows = sum_rows

    def forward(self, x):
        return SumOfGradients.apply(x, self.weight, self.sum_rows, getattr(self.weight, "main_grad", None))


def in_order(values: Tensor) -> Tensor:
    return row_sums(values.t())


def state(module):
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
    tensors = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return hooks, [m.training for m in module.modules()], tensors, [(id(p), id(p.grad)) for p in module.parameters()]


class Product(torch.autograd.Function):
    """Its backward is refused."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy.cumprod(0)
