"""``attention`` in the place of torch's fused operators, inside ``batch_invariant``.

A causal mask of theirs begins at the first key or ends at the last one; only the latter is ``attention``'s. So a causal
operator of the first kind is taken where queries and keys are equally many. Masks of other kinds and dropout are not
taken: there the replacement returns NotImplemented. The backwards are those of ``attention``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_kernels.attention import attention
from cute_kernels.attention.checks import KERNEL_DTYPES, MAX_HEAD_SIZE
from cute_kernels.attention.launch import attention_backward
from cute_kernels.runtime.targets import UnsupportedDeviceError


def _attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, dropout_p: float, **options: Any
) -> tuple[Tensor, Tensor]:
    """(out, lse) of (B, L, H, D) or packed (L, H, D); or NotImplemented."""
    if not is_taken(q, k, v, scale, dropout_p):
        return NotImplemented
    q, k, v = on_16_bytes(q), on_16_bytes(k), on_16_bytes(v)
    try:
        with torch.no_grad():  # the tensors are those that autograd knows, the call is below it
            return attention(q, k, v, causal=causal, scale=scale, return_lse=True, **options)
    except UnsupportedDeviceError:  # a GPU without a kernel
        return NotImplemented


def is_taken(q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout_p: float) -> bool:
    """Whether dtypes, devices, head sizes and options are such as the kernels have."""
    if q.dtype not in KERNEL_DTYPES or not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        return False
    if dropout_p or (scale is not None and not 0.0 < scale < math.inf):
        return False
    return all(size % 8 == 0 and 0 < size <= MAX_HEAD_SIZE for size in (q.shape[-1], v.shape[-1]))


def on_16_bytes(t: Tensor) -> Tensor:
    """t of halves, copied if its rows are not contiguous, or do not start on 16 bytes."""
    *outer, last = t.stride()
    good = last == 1 and not t.data_ptr() & 15
    if good and math.gcd(8, *outer) != 8:  # the stride of one row may be anything
        good = math.gcd(8, *(stride for stride, size in zip(outer, t.shape, strict=False) if size > 1)) == 8
    return t if good else t.clone(memory_format=torch.contiguous_format)


def _attend_heads_first(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Attention of (B, H, L, D), as scaled_dot_product_attention has it."""
    if not q.dim() == k.dim() == v.dim() == 4:
        return NotImplemented
    found = _attend(*(t.transpose(1, 2) for t in (q, k, v)), causal, scale, dropout_p)
    return found if found is NotImplemented else (found[0].transpose(1, 2), found[1])


def _sdpa_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
):
    """Its causal mask ends at the last key."""
    found = NotImplemented if return_debug_mask else _attend_heads_first(q, k, v, is_causal, scale, dropout_p)
    if found is NotImplemented:
        return found
    return *found, None, None, q.shape[2], k.shape[2], *_random_state(q), q.new_empty(0)


def _sdpa_efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
):
    if attn_bias is not None or (is_causal and q.shape[2] != k.shape[2]):
        return NotImplemented
    found = _attend_heads_first(q, k, v, is_causal, scale, dropout_p)
    if found is NotImplemented:
        return found
    return found[0], _padded_lse(found[1], compute_log_sumexp), *_random_numbers(q)


def _sdpa_cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
):
    if attn_bias is not None or return_debug_mask or (is_causal and q.shape[2] != k.shape[2]):
        return NotImplemented
    found = _attend_heads_first(q, k, v, is_causal, scale, dropout_p)
    if found is NotImplemented:
        return found
    out, lse = found
    return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], *_random_numbers(q), None


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
):
    """Attention of (B, L, H, D), or of packed sequences (L, H, D)."""
    if return_debug_mask or alibi_slopes is not None or block_table is not None:
        return NotImplemented
    if q.dim() == 3 and (cum_seq_q is None or cum_seq_k is None):
        return NotImplemented
    options: dict[str, Any] = {}
    if any(distance not in (None, -1) for distance in (window_size_left, window_size_right)):
        options["window"] = (window_size_left, window_size_right)
    if q.dim() == 3:
        lengths = {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
        options |= {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, **lengths}
    if seqused_k is not None:
        options["seqused_k"] = seqused_k
    found = _attend(q, k, v, is_causal, scale, dropout_p, **options)
    return found if found is NotImplemented else (*found, *_random_state(q), q.new_empty(0))


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
    seqlen_k: Tensor | None = None,
    window_size: int | None = None,
):
    """Attention of (B, L, H, D). ``custom_mask_type`` 0: none, 1: causal from top left, 2: from bottom right."""
    if any(t is not None for t in (bias, cu_seqlens_q, cu_seqlens_k, seqlen_k, window_size)):
        return NotImplemented
    if custom_mask_type == 1 and q.shape[1] != k.shape[1]:
        return NotImplemented
    found = _attend(q, k, v, custom_mask_type != 0, scale, dropout_p)
    if found is NotImplemented:
        return found
    return found[0], _padded_lse(found[1], compute_log_sumexp), *_random_numbers(q), q.shape[1], k.shape[1]


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
):
    """varlen_attn's, of torch.nn.attention.varlen."""
    left, right = window_size or (-1, -1)
    options = {"scale": scale, "window_size_left": left, "window_size_right": right}
    options |= {"seqused_k": seqused_k, "block_table": block_table}
    found = _flash(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, is_causal, False, **options)
    return found if found is NotImplemented else (*found[:2], q.new_zeros(2, dtype=torch.uint64))


def _gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    dropout_p: float,
    window: tuple[int | None, int | None] = (None, None),
    *lengths: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v in any of ``_attend``'s layouts; or NotImplemented."""
    if not is_taken(q, k, v, scale, dropout_p):
        return NotImplemented
    dout, q, k, v, out = (on_16_bytes(t) for t in (dout, q, k, v, out))
    left, right = (-1 if distance is None else distance for distance in window)
    options = causal, q.shape[-1] ** -0.5 if scale is None else scale, left, right, 0.0, None, *lengths
    try:
        return attention_backward(dout, q, k, v, out, lse.contiguous(), None, *options)[:3]
    except UnsupportedDeviceError:
        return NotImplemented


def _gradients_heads_first(
    tensors: Sequence[Tensor], lse: Tensor, causal: bool, scale: float | None, dropout_p: float
) -> tuple[Tensor, ...]:
    """The gradients of q, k and v; ``tensors`` are dout, q, k, v, out, each (B, H, L, D)."""
    found = _gradients(*(t.transpose(1, 2) for t in tensors), lse, causal, scale, dropout_p)
    return found if found is NotImplemented else tuple(t.transpose(1, 2) for t in found)


def _sdpa_flash_backward(
    dout, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, *_, scale: float | None = None
):
    return _gradients_heads_first((dout, q, k, v, out), lse, is_causal, scale, dropout_p)


def _sdpa_efficient_backward(
    dout,
    q,
    k,
    v,
    attn_bias,
    out,
    lse,
    philox_seed,
    philox_offset,
    dropout_p,
    grad_input_mask,
    is_causal: bool = False,
    *,
    scale: float | None = None,
):
    if attn_bias is not None or (is_causal and q.shape[2] != k.shape[2]):
        return NotImplemented
    found = _gradients_heads_first((dout, q, k, v, out), lse[..., : q.shape[2]], is_causal, scale, dropout_p)
    return found if found is NotImplemented else (*found, None)


def _sdpa_cudnn_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    philox_seed,
    philox_offset,
    attn_bias,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    *,
    scale: float | None = None,
):
    if attn_bias is not None or (is_causal and q.shape[2] != k.shape[2]):
        return NotImplemented
    return _gradients_heads_first((dout, q, k, v, out), lse.squeeze(-1), is_causal, scale, dropout_p)


def _flash_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
):
    window = (window_size_left, window_size_right)
    lengths = (cum_seq_q, cum_seq_k, max_q, max_k) if q.dim() == 3 else ()
    return _gradients(dout, q, k, v, out, lse, is_causal, scale, dropout_p, window, *lengths)


def _varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    is_causal,
    rng_state,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
):
    window = tuple(window_size or (-1, -1))
    return _gradients(dout, q, k, v, out, lse, is_causal, scale, 0.0, window, cu_seq_q, cu_seq_k, max_q, max_k)


def _padded_lse(lse: Tensor, wanted: bool) -> Tensor:
    """As the memory-efficient kernels keep it for their backward: whole tiles of 32 rows."""
    return F.pad(lse, (0, -lse.shape[2] % 32), value=math.inf) if wanted else lse[..., :0]


def _random_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """The random state from which a backward would make dropout's masks, if there were any."""
    return q.new_zeros(2, dtype=torch.uint64), q.new_zeros((), dtype=torch.uint64)


def _random_numbers(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_zeros((), dtype=torch.int64), q.new_zeros((), dtype=torch.int64)


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention.default": _sdpa_flash,
    "_scaled_dot_product_efficient_attention.default": _sdpa_efficient,
    "_scaled_dot_product_cudnn_attention.default": _sdpa_cudnn,
    "_flash_attention_forward.default": _flash,
    "_efficient_attention_forward.default": _efficient,
    "_scaled_dot_product_flash_attention_backward.default": _sdpa_flash_backward,
    "_scaled_dot_product_efficient_attention_backward.default": _sdpa_efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward.default": _sdpa_cudnn_backward,
    "_flash_attention_backward.default": _flash_backward,
}
# Operators of other namespaces than aten, by whole names
OTHERS: dict[str, Callable[..., Any]] = {
    "torch_attn::_varlen_attn.default": _varlen,
    "torch_attn::_varlen_attn_backward.default": _varlen_backward,
}
