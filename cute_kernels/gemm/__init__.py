"""Deterministic, batch-invariant products: mm, bmm, linear."""

from cute_kernels.gemm.op import bmm, linear, mm

__all__ = ["bmm", "linear", "mm"]
