"""Deterministic, batch-invariant matrix products: mm, linear."""

from cute_kernels.gemm.op import linear, mm

__all__ = ["linear", "mm"]
