"""The operators of the hyper-connections on torch tensors: the public functions, allocation, autograd."""

from cute_kernels.mhc.op.aggregate import aggregate
from cute_kernels.mhc.op.coefficients import coefficients
from cute_kernels.mhc.op.contract import contract
from cute_kernels.mhc.op.expand import expand
from cute_kernels.mhc.op.expand_combine import expand_combine
from cute_kernels.mhc.op.head import head
from cute_kernels.mhc.op.hyper_connection import hyper_connection
from cute_kernels.mhc.op.pre import pre
from cute_kernels.mhc.op.projection import projection
from cute_kernels.mhc.op.sinkhorn import sinkhorn

__all__ = [
    "aggregate",
    "coefficients",
    "contract",
    "expand",
    "expand_combine",
    "head",
    "hyper_connection",
    "pre",
    "projection",
    "sinkhorn",
]
