"""GPU kernels for training large models in NVIDIA's CuTe DSL: deterministic, batch-invariant, fast.

Importing it imports neither the compiler nor initialises CUDA; a kernel compiles on its first call and is kept on disk.
"""

from cute_kernels._target import UnsupportedDeviceError
from cute_kernels.gemm import Provenance, linear, mm, provenance
from cute_kernels.invariance import check_invariance
from cute_kernels.norm import layer_norm, rms_norm

__version__ = "0.1.0"
__all__ = [
    "Provenance",
    "UnsupportedDeviceError",
    "check_invariance",
    "layer_norm",
    "linear",
    "mm",
    "provenance",
    "rms_norm",
]
