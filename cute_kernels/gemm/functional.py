"""For modules and other families, beside the public ops: the check of a layer's options, products of experts."""

from cute_kernels.gemm.checks import Activation, check_epilogue
from cute_kernels.gemm.launch_grouped import grouped_rows
from cute_kernels.gemm.op.grouped_mm import weight_gradient

__all__ = ["Activation", "check_epilogue", "grouped_rows", "weight_gradient"]
