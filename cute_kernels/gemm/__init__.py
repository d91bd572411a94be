"""Deterministic, batch-invariant matrix products: mm, linear; provenance says which kernel computed them."""

from cute_kernels.gemm.op import linear, mm
from cute_kernels.gemm.provenance import Provenance, provenance

__all__ = ["Provenance", "linear", "mm", "provenance"]
