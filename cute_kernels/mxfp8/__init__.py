"""Block-scaled fp8 quantization (OCP MX specification 1.0): expert weights, activations, gradients, and back."""

from cute_kernels.mxfp8.op import (
    dequantize,
    from_blocked,
    quantize_3d_colwise,
    quantize_3d_dual,
    quantize_colwise,
    quantize_dual,
    quantize_rowwise,
    to_blocked,
)

__all__ = [
    "dequantize",
    "from_blocked",
    "quantize_3d_colwise",
    "quantize_3d_dual",
    "quantize_colwise",
    "quantize_dual",
    "quantize_rowwise",
    "to_blocked",
]
