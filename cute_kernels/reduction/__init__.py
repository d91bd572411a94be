"""Softmax, sums, prefix sums, norms and variances whose bits do not depend on how many of them there are."""

from cute_kernels.reduction.op import log_softmax, mean, softmax, sum
from cute_kernels.reduction.op_statistics import cumsum, logsumexp, norm, norms, std, var

__all__ = ["cumsum", "log_softmax", "logsumexp", "mean", "norm", "norms", "softmax", "std", "sum", "var"]
