"""Deterministic, batch-invariant products: mm, bmm, linear, linear_log_prob."""

from cute_kernels.gemm.op import bmm, linear, mm
from cute_kernels.gemm.op_log_prob import linear_log_prob

__all__ = ["bmm", "linear", "linear_log_prob", "mm"]
