"""The matrix products on torch tensors: the public functions, allocation, autograd."""

from cute_kernels.gemm.op.bmm import bmm
from cute_kernels.gemm.op.grouped_mm import grouped_mm
from cute_kernels.gemm.op.linear import linear
from cute_kernels.gemm.op.mm import mm

__all__ = ["bmm", "grouped_mm", "linear", "mm"]
