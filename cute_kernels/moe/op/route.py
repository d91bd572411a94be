"""route on torch tensors: the public function, allocation, autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.moe import reference
from cute_kernels.moe.checks import Groups, check_route
from cute_kernels.moe.launch import moe_route, moe_route_backward
from cute_kernels.moe.reference import Routing, as_int32
from cute_kernels.runtime.autograd import apply, first_derivative_only
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import detached, differentiates, mode_of, uses_reference
from cute_kernels.runtime.real import as_float


def route(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    bias: Tensor | None = None,
    groups: Groups | None = None,
    normalize: bool = True,
    eps: float = 0.0,
    scale: float = 1.0,
    indices: Tensor | None = None,
    backend: Backend | None = None,
) -> Routing:
    """The ``k`` best experts of each token and their weights, a token's bits independent of the other tokens.

    Args:
        logits: (T, E) fp32, of any strides; E at most 1024.
        k: experts of a token, at most 32.
        score: "softmax" over all experts; "sigmoid"; "softmax_of_topk": softmax over the chosen ones.
        bias: (E,) fp32 that is added to the scores for the selection alone; with "sigmoid".
        groups: (n, kept): experts are in n groups of neighbours, of which the best ``kept`` remain, by the sum of their
            two best scores. None: all remain.
        normalize: weights are divided by their sum + ``eps``. "softmax_of_topk" needs no such division.
        eps: see ``normalize``.
        scale: what weights are multiplied with.
        indices: (T, k) int32 or int64: experts that were chosen before, to be taken instead. Weights are computed from
            these logits. An index outside of [0, E) is an empty slot of weight 0.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        ``Routing``: indices (T, k) int32, ascending in each token, and weights (T, k) fp32, with a gradient.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.

    Numerics:
        The highest scores are chosen, of equal ones that of the lower expert; -0 equals +0. A softmax' order is that of
        its logits. A token with a NaN among its logits has the experts 0 to k - 1, and NaN for weights. Sums run over
        experts in a fixed order: indices and weights of a token depend on its own logits alone, and weights on the set
        of its experts, not on the order of ``indices``.

    Source:
        Shazeer et al., arXiv 1701.06538; DeepSeek-V3, arXiv 2412.19437, equations 12 to 16.

    Example:
        >>> import torch
        >>> from cute_kernels import moe
        >>> routing = moe.route(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 2)
        >>> routing.indices.tolist(), routing.weights.tolist()
        ([[1, 2]], [[0.5, 0.5]])
    """
    eps, scale = as_float(eps), as_float(scale)
    if uses_reference("route", logits, backend):
        options = {"score": score, "bias": bias, "groups": groups, "normalize": normalize, "eps": eps, "scale": scale}
        return reference.route(logits, k, **options, indices=indices)
    check_route(logits, k, score, bias, groups, eps, scale, indices)
    kind = "chosen" if score == "softmax_of_topk" or (score == "softmax" and normalize and not eps) else score
    if kind == "chosen":
        eps = 0.0
    normalize = normalize and kind != "chosen"
    logits = logits.contiguous()
    bias = None if bias is None else detached(bias).contiguous()
    indices = None if indices is None else as_int32(indices).contiguous()
    options = (kind, *(groups or (1, 1)), normalize, eps, scale)
    if differentiates(logits):
        return Routing(*apply(_RouteFunction, logits, bias, indices, k, options))
    return Routing(*_forward(logits, bias, indices, k, options))


def _forward(logits: Tensor, bias: Tensor | None, given: Tensor | None, k: int, options: tuple) -> tuple:
    shape = logits.shape[0], k
    mode = mode_of(logits, bias, given)
    indices, weights = mode.empty(logits, shape, torch.int32), mode.empty(logits, shape, torch.float32)
    mode.of(moe_route)(logits, bias, given, indices, weights, *options)
    return indices, weights


class _RouteFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, bias, given, k, options):
        indices, weights = _forward(logits, bias, given, k, options)
        ctx.save_for_backward(logits, indices)
        ctx.options = options
        ctx.mark_non_differentiable(indices)
        return indices, weights

    @staticmethod
    @first_derivative_only
    def backward(ctx, _, dweights):
        logits, indices = ctx.saved_tensors
        score, _, _, normalize, eps, scale = ctx.options
        mode = mode_of(dweights, logits, indices)
        dlogits = mode.empty(logits, logits.shape, logits.dtype)
        mode.of(moe_route_backward)(dweights.contiguous(), logits, indices, dlogits, score, normalize, eps, scale)
        return dlogits, None, None, None, None
