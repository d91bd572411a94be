"""For modules, beside the public ops: the check of a layer's options."""

from cute_kernels.gemm.checks import Activation, check_epilogue

__all__ = ["Activation", "check_epilogue"]
