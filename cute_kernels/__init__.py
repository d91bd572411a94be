"""GPU kernels for training large models in NVIDIA's CuTe DSL: deterministic, batch-invariant, fast.

Importing it imports neither the compiler nor initialises CUDA; a kernel compiles on its first call and is kept on disk.

On a CPU the ops are plain torch, which takes layouts and dtypes that the kernels refuse (leading dimensions that do not
collapse to rows of one stride, rows off 16 bytes, fp64). With ``CUTE_KERNELS_STRICT_LAYOUT=1`` in the environment when
it is imported, plain torch refuses them, too, in the kernels' words.
"""

import jit_cache.source  # noqa: F401  first: what is read after it is known not to be older

# isort: split
from cute_kernels import mhc, moe, reduction, scatter
from cute_kernels.attention import attention, attention_with_kv_cache, merge_attention
from cute_kernels.gemm import bmm, grouped_mm, linear, mm
from cute_kernels.invariance import (
    Provenance,
    UncoveredOperatorError,
    audit,
    batch_invariant,
    check_invariance,
    declare_invariant,
    install,
    is_installed,
    provenance,
    uninstall,
)
from cute_kernels.invariance.flash_attention import register as register_flash_attention
from cute_kernels.log_prob import linear_log_prob
from cute_kernels.mxfp8 import (
    dequantize,
    from_blocked,
    quantize_3d_colwise,
    quantize_3d_dual,
    quantize_colwise,
    quantize_dual,
    quantize_rowwise,
    to_blocked,
)
from cute_kernels.norm import layer_norm, rms_norm
from cute_kernels.runtime.flops import register_formulas
from cute_kernels.runtime.targets import UnsupportedDeviceError
from cute_kernels.sampling import sample
from cute_kernels.version import __version__

register_formulas()
register_flash_attention()

__all__ = [
    "__version__",
    "Provenance",
    "UncoveredOperatorError",
    "UnsupportedDeviceError",
    "attention",
    "attention_with_kv_cache",
    "audit",
    "batch_invariant",
    "bmm",
    "check_invariance",
    "declare_invariant",
    "dequantize",
    "from_blocked",
    "grouped_mm",
    "install",
    "is_installed",
    "layer_norm",
    "linear",
    "linear_log_prob",
    "merge_attention",
    "mhc",
    "mm",
    "moe",
    "provenance",
    "quantize_3d_colwise",
    "quantize_3d_dual",
    "quantize_colwise",
    "quantize_dual",
    "quantize_rowwise",
    "reduction",
    "rms_norm",
    "sample",
    "scatter",
    "to_blocked",
    "uninstall",
]
