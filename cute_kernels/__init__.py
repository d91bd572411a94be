"""GPU kernels for training large models in NVIDIA's CuTe DSL: deterministic, batch-invariant, fast.

Importing it imports neither the compiler nor initialises CUDA; a kernel compiles on its first call and is kept on disk.
"""

from cute_kernels._target import UnsupportedDeviceError
from cute_kernels.gemm import linear, mm
from cute_kernels.norm import layer_norm, rms_norm

__version__ = "0.1.0"
__all__ = ["UnsupportedDeviceError", "layer_norm", "linear", "mm", "rms_norm"]
