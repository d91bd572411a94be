"""Fakes of softmax, log_softmax and sums."""

import math

import torch

from cute_kernels.reduction import reference
from cute_kernels.reduction.config import COLUMN_ROWS, WHOLE_PART

FUNCTIONS = {False: torch.softmax, True: torch.log_softmax}


def softmax_forward(static, x, y, clusters) -> None:
    assert clusters >= 1 and static["config"].layout.n == x.shape[1]
    # fp64: what torch's sums owe to the number of rows is then gone with the rounding
    y.copy_(FUNCTIONS[static["spec"].log](x.double(), -1))


def softmax_backward(static, y, dy, dx, clusters) -> None:
    y, dy = y.double(), dy.double()
    if static["spec"].log:
        dx.copy_(dy - y.exp() * dy.sum(-1, keepdim=True))
    else:
        dx.copy_(y * (dy - (dy * y).sum(-1, keepdim=True)))


def row_sums(static, x, y, scale, clusters) -> None:
    assert clusters >= 1 and static["config"].layout.n == x.shape[1]
    y.copy_(_elements(static, x).sum(1).float() * scale)


def column_sums(static, x, y, scale) -> None:
    assert y.shape == (x.shape[0], math.ceil(x.shape[1] / COLUMN_ROWS), x.shape[2])
    assert x.shape[2] % static["spec"].vec == 0  # or the last access of the last row would end beyond the matrix
    parts = [part.sum(1).float() * scale for part in _elements(static, x).split(COLUMN_ROWS, 1)]
    y.copy_(torch.stack(parts, 1))


def whole_sums(static, x, n, partials, y, scale) -> None:
    assert x.shape == (len(y), n) and partials.shape == (len(y), math.ceil(n / WHOLE_PART))
    assert partials.stride(0) % 4 == 0 and x.data_ptr() % (static["spec"].vec * x.itemsize) == 0
    y.copy_(torch.stack([reference.whole_sum(line, static["spec"].squares) for line in x]) * scale)


def _elements(static, x):
    return x.double().square() if static["spec"].squares else x.double()


def log_sum_exp(static, x, y, clusters) -> None:
    assert clusters >= 1 and static["config"].layout.n == x.shape[1]
    y.copy_(torch.logsumexp(x.double(), -1))


def variances(static, x, y, scale, clusters) -> None:
    assert clusters >= 1 and static["config"].layout.n == x.shape[1]
    x = x.double()
    y.copy_((x - x.mean(1, keepdim=True)).square().sum(1).float() * scale)


def prefix_sums(static, x, y) -> None:
    assert x.shape[1] % static["spec"].vec == 0
    y.copy_(x.double().cumsum(1))
