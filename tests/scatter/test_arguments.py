"""Bad arguments of sums by an index raise the same on the CPU and in the kernels' path."""

import contextlib

import pytest
import torch

from cute_kernels import scatter
from tests.fakes import fake_kernels

IDS, W, DY = torch.zeros(3, dtype=torch.int64), torch.zeros(4, 2), torch.zeros(3, 2)
BAD = [
    (lambda: scatter.embedding([0], W), TypeError, "embedding: ids must be a torch.Tensor, got list"),
    (lambda: scatter.embedding(IDS.float(), W), TypeError, "embedding: ids must have dtype int64, int32, got"),
    (lambda: scatter.embedding(IDS, 1), TypeError, "embedding: weight must be a torch.Tensor, got int"),
    (lambda: scatter.embedding(IDS, W.double()), TypeError, "embedding: weight must have dtype bfloat16"),
    (lambda: scatter.embedding(IDS, W[0]), ValueError, "embedding: weight must be a matrix"),
    (lambda: scatter.embedding(IDS, W, padding_idx=4), ValueError, "padding_idx must be None or a row of 4, got 4"),
    (lambda: scatter.embedding(IDS, W, padding_idx=1.0), TypeError, "embedding: padding_idx must be an int"),
    (lambda: scatter.embedding(IDS, W, backend="cuda"), ValueError, "embedding: backend must be None or"),
    (lambda: scatter.embedding_backward(DY.long(), IDS, 4), TypeError, "embedding_backward: dy must have dtype"),
    (lambda: scatter.embedding_backward(DY[:2], IDS, 4), ValueError, r"dy must have shape \(3, 'columns'\), got"),
    (lambda: scatter.embedding_backward(DY, IDS, -1), ValueError, "embedding_backward: num_rows must be from 0"),
    (lambda: scatter.embedding_backward(DY, IDS, 4.0), TypeError, "embedding_backward: num_rows must be an int"),
    (lambda: scatter.embedding_backward(DY, IDS, 4, out_dtype=torch.int32), TypeError, "out_dtype must have dtype"),
    (lambda: scatter.index_sum(W.long(), IDS, DY), TypeError, "index_sum: x must have dtype"),
    (lambda: scatter.index_sum(W, IDS.bool(), DY), TypeError, "index_sum: index must have dtype int64, int32"),
    (lambda: scatter.index_sum(W, IDS, DY, dim=2), ValueError, "index_sum: dim must be of 2 dimensions, got 2"),
    (lambda: scatter.index_sum(W, IDS, DY, dim=None), TypeError, "index_sum: dim must be an int"),
    (
        lambda: scatter.index_sum(W, IDS, DY[:2]),
        ValueError,
        r"index_sum: source must have shape \(3, 2\), got \(2, 2\)",
    ),
    (lambda: scatter.index_sum(W, IDS.view(3, 1), DY), ValueError, r"index_sum: index must have shape \(3, 2\)"),
    (lambda: scatter.index_sum(W, IDS.view(3, 1, 1), DY), ValueError, "index must have 1 dimension, or x's 2"),
    (lambda: scatter.index_sum(W.sum(), IDS, DY), ValueError, "index_sum: x must have at least one dimension"),
    (lambda: scatter.index_sum(W, IDS.to("meta"), DY), ValueError, "index_sum: index must be on cpu, got meta"),
]


@pytest.mark.parametrize("path", ["reference", "kernels"])
@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_arguments(call, error, message, path):
    with contextlib.nullcontext() if path == "reference" else fake_kernels(), pytest.raises(error, match=message):
        call()
