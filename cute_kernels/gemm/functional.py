"""For modules and other families, beside the public ops: a layer's check, products of experts and of fp32."""

from cute_kernels.gemm.checks import Activation, check_epilogue, check_mxfp8_matrices
from cute_kernels.gemm.fp32 import product as fp32_product
from cute_kernels.gemm.launch import gemm
from cute_kernels.gemm.launch_grouped import grouped_rows, grouped_sums, grouped_sums_into
from cute_kernels.gemm.launch_mxfp8 import grouped_rows_mxfp8
from cute_kernels.gemm.op.grouped_mm import weight_gradient

__all__ = [
    "Activation",
    "check_epilogue",
    "check_mxfp8_matrices",
    "fp32_product",
    "gemm",
    "grouped_rows",
    "grouped_rows_mxfp8",
    "grouped_sums",
    "grouped_sums_into",
    "weight_gradient",
]
