"""Hyper-connections in plain torch: the specification of the kernels, and what runs without a supported GPU.

A residual holds n streams x_i of C channels for each token, K = n * C numbers in the order of its memory; phi's columns
have the same order. With the coefficients of a token in the order [pre n | post n | res n * n, row by row]:

H = x (phi * norm_weight)^T, mean_square = mean(x^2)                                        projection
h = alpha * H / rms + beta;  pre = sigmoid(h) + pre_eps, post = post_mult * sigmoid(h)      coefficients
res = the matrix of h, made doubly stochastic                                               sinkhorn
layer_input = sum_i pre_i x_i                                                               aggregate
out_o = (f + bias) post_o + sum_i R(i, o) x_i,  f = sublayer(layer_input)                   expand_combine

All in ``compute_dtype``. Results in x's dtype are rounded once, at the end; coefficients stay in ``compute_dtype``
(fp64 of it admits fp64 tensors, too). ``precision`` chooses how the kernels multiply and changes nothing here. A
parameter's gradient is added to its ``main_grad`` where it has one, and its ``grad`` stays None; a tensor hook on
such a parameter is an error.

Source: Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880.
"""

from cute_kernels.mhc.reference.aggregate import aggregate
from cute_kernels.mhc.reference.coefficients import coefficients
from cute_kernels.mhc.reference.contract import contract
from cute_kernels.mhc.reference.dropout import dropout_mask
from cute_kernels.mhc.reference.expand import expand
from cute_kernels.mhc.reference.expand_combine import expand_combine
from cute_kernels.mhc.reference.head import head
from cute_kernels.mhc.reference.hyper_connection import hyper_connection
from cute_kernels.mhc.reference.pre import pre
from cute_kernels.mhc.reference.projection import projection
from cute_kernels.mhc.reference.sinkhorn import sinkhorn

__all__ = [
    "aggregate",
    "coefficients",
    "contract",
    "dropout_mask",
    "expand",
    "expand_combine",
    "head",
    "hyper_connection",
    "pre",
    "projection",
    "sinkhorn",
]
