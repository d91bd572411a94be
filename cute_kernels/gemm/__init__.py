"""Deterministic, batch-invariant products: mm, bmm, grouped_mm, linear."""

from cute_kernels.gemm.op import bmm, grouped_mm, linear, mm

__all__ = ["bmm", "grouped_mm", "linear", "mm"]
