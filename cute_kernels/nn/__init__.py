"""torch.nn modules over the operators."""

from cute_kernels.nn.linear import Linear
from cute_kernels.nn.norm import LayerNorm, RMSNorm

__all__ = ["LayerNorm", "Linear", "RMSNorm"]
