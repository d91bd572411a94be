"""linear_log_prob on torch tensors: the public function, allocation, autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.log_prob import reference
from cute_kernels.log_prob.checks import check_log_prob
from cute_kernels.log_prob.launch import log_prob_backward, log_prob_forward
from cute_kernels.runtime.autograd import apply, as_rows, first_derivative_only, gradient_buffer, needs_gradient
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import differentiates, mode_of, uses_reference
from cute_kernels.runtime.real import as_float


def linear_log_prob(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    keep_logits: bool = False,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token's target, and entropy, under the logits ``x weight^T / temperature``.

    With a scale and a softcap these are ``softcap * tanh(scale * x weight^T / softcap) / temperature``.

    No (tokens, V) tensor is in memory unless ``keep_logits``. The forward keeps 12 bytes of each 128 logits (SM100: 64)
    for up to 16384 tokens at a time. The backward makes the logits again in parts, whose gradients take 128 MiB (more
    from 32768 tokens on), beside dx in fp32.

    Args:
        x: (..., K) bf16 or fp16, rows contiguous, each starting on 16 bytes; the leading dimensions must collapse to
            rows of one stride.
        weight: (V, K) of x's dtype, rows or columns contiguous, each starting on 16 bytes.
        target: (...) int64 or int32: the column of each token's logits. Copied unless contiguous.
        ignore_index: tokens with this target have log-probability and entropy 0, and no gradient goes through them.
        temperature: the divisor of the logits, a real number from 1e-6 to 1e6.
        scale: what logits are multiplied with before all else, a real number from 1e-6 to 1e6.
        softcap: logits become softcap * tanh(logit / softcap), before the temperature: 0 (they stay), or a real number
            from 1e-6 to 1e6.
        keep_logits: the backward takes the logits that the forward has stored in x's dtype, 2 tokens V bytes, rather
            than multiply again: three products in all, not four. See Numerics. Ignored where nothing requires grad,
            and by the reference.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch, which holds
            all logits.

    Returns:
        (log_prob, entropy), each (...) fp32, in nats. Both are NaN, without a gradient, where the target is neither a
        column nor ``ignore_index``.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Logits of -inf, or so low that their probability is 0 (a masked vocabulary), add 0 to the entropy and to every
    gradient. The weight of such columns must be finite for dx to be, the x of ignored tokens for dweight to be: a
    gradient of 0 through an infinity is NaN. A token without a logit above -inf gets NaN. In fp16 scale the loss:
    gradients of logits underflow, or overflow at small temperatures. The temperature divides a logit's difference to
    the row's largest one: only the rounding of the logits' sums grows with 1 / temperature, under a softcap that of
    tanh, some 2^-22 softcap. There a logit of -inf becomes -softcap. A log-probability is never above 0, an entropy
    never below.

    Numerics:
        Logits are summed by the contract ``serial_k16`` (exact products, one fp32 accumulator over the whole K,
        ascending, in steps of 16), in fp32, never rounded. A token's exponentials are added in fp32 in an order that V
        alone fixes: in tiles of 128 columns of the vocabulary (SM100: 64), tile t in group t mod 64, a group's tiles
        ascending, then the groups, all relative to the row's largest logit. Its log-probability, its entropy and its
        row of dx have the same bits whatever the number of tokens, its place and the others.

        In the backward the gradient of a logit is rounded to x's dtype, as a factor of two products: dx sums over the
        vocabulary in ascending order, dweight over the tokens in theirs. With ``keep_logits`` it is the gradient at the
        rounded logit ``x weight^T``, beside the same statistics: in bf16 a probability is off by up to 2^-9 of its
        logit, relatively, and what is added to dx and dweight is that far from the gradients without; log_prob and
        entropy are the same bits, and a row of dx is as independent of other tokens. In fp16 logits must be below
        65504. The gradients take the logits' place, so the backward runs once: with ``retain_graph`` a second one is a
        RuntimeError.

        Where ``weight.main_grad`` (fp32) exists, dweight starts from it and ``weight.grad`` stays None: micro-batches
        split at multiples of 16 tokens give the bits of one. A hook of ``weight.register_hook``, which would get None,
        is then an error in the backward; a compiled backward does not see it.

    Source:
        Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, over tiles of fixed columns.

    Example:
        >>> import torch
        >>> from cute_kernels import linear_log_prob
        >>> x, weight = torch.zeros(2, 8, dtype=torch.bfloat16), torch.ones(4, 8, dtype=torch.bfloat16)
        >>> log_prob, entropy = linear_log_prob(x, weight, torch.tensor([1, -100]))
        >>> log_prob.exp(), entropy.shape
        (tensor([0.2500, 1.0000]), torch.Size([2]))
    """
    if uses_reference("linear_log_prob", x, backend):
        options = {"ignore_index": ignore_index, "temperature": temperature, "scale": scale, "softcap": softcap}
        return reference.linear_log_prob(x, weight, target, keep_logits=keep_logits, **options)
    numbers = ignore_index, as_float(temperature), as_float(scale), as_float(softcap)
    check_log_prob(x, weight, target, *numbers, keep_logits)
    if differentiates(x, weight):
        return apply(_LinearLogProb, x, weight, target, keep_logits, *numbers)
    return _forward(x, weight, target, False, *numbers)[:2]


def _forward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    keep_logits: bool,
    ignore_index: int,
    temperature: float,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Log-probabilities, entropies, and what the backward needs of each row: statistics, logits that are kept."""
    rows, targets = as_rows("linear_log_prob", "x", x), target.reshape(-1).contiguous()
    mode = mode_of(x, weight, target)
    log_prob, entropy = (mode.empty(x, target.shape, torch.float32) for _ in range(2))
    row_statistics = mode.empty(x, (rows.shape[0], 3), torch.float32)
    logits = None
    if keep_logits:
        v = weight.shape[0]
        logits = mode.empty(x, (rows.shape[0], v + -v % 8), x.dtype)[:, :v]  # rows that TMA can read
    results = log_prob.view(-1), entropy.view(-1), row_statistics, logits
    mode.of(log_prob_forward)(rows, weight, targets, *results, ignore_index, temperature, scale, softcap)
    return log_prob, entropy, row_statistics, logits


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, target, keep_logits, *numbers):
        log_prob, entropy, row_statistics, logits = _forward(x, weight, target, keep_logits, *numbers)
        ctx.save_for_backward(x, weight, target, row_statistics, logits)
        ctx.options = numbers
        ctx.main_grad = getattr(weight, "main_grad", None)
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    @first_derivative_only
    def backward(ctx, dlog_prob, dentropy):
        x, weight, target, row_statistics, logits = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        needs_weight = needs_gradient(needs_weight, weight, ctx.main_grad)
        if (dlog_prob is None and dentropy is None) or not (needs_x or needs_weight):
            return (None,) * 8
        dweight = result = None
        if needs_weight:
            dweight, result = gradient_buffer("linear_log_prob", "weight", weight, ctx.main_grad)
        mode = mode_of(x, weight, target, dlog_prob, dentropy, dweight)
        dx = mode.empty(x, x.shape, x.dtype) if needs_x else None
        if dlog_prob is None:
            dlog_prob = torch.zeros_like(dentropy)
        mode.of(log_prob_backward)(
            dlog_prob.reshape(-1).contiguous().resolve_neg(),  # of one token a sign may be left to the reader
            None if dentropy is None else dentropy.reshape(-1).contiguous().resolve_neg(),
            as_rows("linear_log_prob", "x", x),
            weight,
            target.reshape(-1).contiguous(),
            row_statistics,
            logits,
            None if dx is None else as_rows("linear_log_prob", "dx", dx),
            dweight,
            *ctx.options,
            needs_weight and result is None,
        )
        return dx, result, *(None,) * 6
