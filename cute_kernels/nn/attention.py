"""Causal attention with rotary embedding, through torch's scaled_dot_product_attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cute_kernels.nn.hyper_connection import FloatModule
from cute_kernels.nn.linear import Linear
from cute_kernels.runtime.autograd import first_derivative_only

if TYPE_CHECKING:
    from cute_kernels.nn.transformer import TransformerConfig


class RotaryEmbedding(FloatModule):
    """The table of the rotary embedding: cosines and sines of position times frequency, fp32.

    Source: Su et al., RoFormer, arXiv 2104.09864; channels i and i + D / 2 of a head are a pair.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TransformerConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_heads
        self.theta = config.rope_theta
        for name, width in (("cos", self.head_size), ("sin", self.head_size // 2)):
            empty = torch.empty((config.max_sequence_length, 1, width), dtype=torch.float32, device=device)
            self.register_buffer(name, empty, persistent=False)
        self.reset_parameters()

    def _apply(self, fn, recurse=True):
        before = self.cos
        try:
            super()._apply(fn, recurse)
        except NotImplementedError:  # a table on the meta device cannot be moved: it is made where it is to be
            device = fn(torch.empty(0, device="cpu")).device
            self.cos, self.sin = (torch.empty_like(t, device=device) for t in (self.cos, self.sin))
        if self.cos is not before:  # ``to_empty`` fills none, and no state_dict has the table
            self.reset_parameters()
        return self

    def leave_meta(self, device: torch.device) -> None:
        """Make a table on the meta device anew, on this one: ``load_state_dict(assign=True)`` brings none."""
        if self.cos.is_meta and device.type != "meta":
            with torch.inference_mode(False):  # a later call may differentiate
                self.to_empty(device=device)

    def reset_parameters(self) -> None:
        """Fill the table, made on the CPU: the same bits wherever it is."""
        channels = torch.arange(0, self.head_size, 2, dtype=torch.float64, device="cpu")
        positions = torch.arange(len(self.cos), dtype=torch.float64, device="cpu")
        angles = positions[:, None, None] * self.theta ** (-channels / self.head_size)
        with torch.no_grad():
            self.cos.copy_(angles.cos().repeat(1, 1, 2))
            self.sin.copy_(angles.sin())

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), (length, 1, D) and (length, 1, D / 2)."""
        return self.cos[:length], self.sin[:length]


class Attention(nn.Module):
    """Causal self-attention of ``num_heads`` heads, with fewer of keys and values if the config says so.

    Arguments as of ``MHCTransformer``. Source of the grouped heads: Ainslie et al., GQA, arXiv 2305.13245.
    """

    def __init__(self, config: TransformerConfig, **options) -> None:
        super().__init__()
        c, heads, kv_heads = config.hidden_size, config.num_heads, config.kv_heads
        self.heads = heads, kv_heads
        self.head_size = c // heads
        options = {"bias": False, "backend": config.backend, **options}
        self.qkv = Linear(c, (heads + 2 * kv_heads) * self.head_size, **options)
        self.out = Linear(c, c, **options)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """(B, S, C) from (B, S, C)."""
        heads, kv_heads = self.heads
        q, k, v = _SplitRotated.apply(self.qkv(x), *rotation, heads, kv_heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        return self.out(y.transpose(1, 2).flatten(2).to(x.dtype))  # under autocast y has its dtype


class _SplitRotated(torch.autograd.Function):
    """q, k and v, (B, heads, S, D), of qkv (B, S, heads and heads D); q and k rotated.

    One Function, so that the three gradients are written to their places in one tensor.
    """

    @staticmethod
    def forward(ctx, qkv, cos, sin, heads, kv_heads):
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads, kv_heads
        per_head = qkv.unflatten(-1, (heads + 2 * kv_heads, -1))
        rotates = heads + kv_heads
        qk = qkv.new_empty((*qkv.shape[:-1], rotates, per_head.shape[-1]))
        _rotate(per_head[:, :, :rotates], cos, sin, qk)
        q, k = qk.split((heads, kv_heads), 2)
        return q.transpose(1, 2), k.transpose(1, 2), per_head[:, :, rotates:].transpose(1, 2)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dq, dk, dv):
        cos, sin = ctx.saved_tensors
        heads, kv_heads = ctx.heads
        batch, _, length, size = dq.shape
        dqkv = dq.new_empty((batch, length, heads + 2 * kv_heads, size))
        back = -sin
        _rotate(dq.transpose(1, 2), cos, back, dqkv[:, :, :heads])
        _rotate(dk.transpose(1, 2), cos, back, dqkv[:, :, heads : heads + kv_heads])
        dqkv[:, :, heads + kv_heads :] = dv.transpose(1, 2)
        return dqkv.flatten(2), None, None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """out (B, S, heads, D) is x, each pair of channels rotated by its angle; fp32 products, the first rounded."""
    if torch.compiler.is_compiling():  # which knows no strided out, and makes one kernel of it all
        out.copy_(x * cos)
    else:
        torch.mul(x, cos, out=out)
    half = x.shape[-1] // 2
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
