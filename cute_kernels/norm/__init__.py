"""layer_norm and rms_norm, forward and backward."""

from cute_kernels.norm.op import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
