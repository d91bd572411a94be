"""Causal attention with rotary embedding: ``attention``, or torch's own where the config says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cute_kernels.attention import attention, attention_with_kv_cache
from cute_kernels.attention.checks import MAX_HEAD_SIZE
from cute_kernels.nn.hyper_connection import FloatModule
from cute_kernels.nn.linear import Linear
from cute_kernels.runtime import launches
from cute_kernels.runtime.autograd import first_derivative_only
from cute_kernels.runtime.checks import fail
from cute_kernels.runtime.operators import differentiates, uses_reference
from cute_kernels.runtime.targets import UnsupportedDeviceError

if TYPE_CHECKING:
    from cute_kernels.nn.transformer import TransformerConfig

PAGE_SIZE = 128  # keys


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

    def forward(self, length: int, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(cos, sin), (length, 1, D) and (length, 1, D / 2); of places from ``first`` (B,) on (B, length, 1, ...)."""
        if first is None:
            return self.cos[:length], self.sin[:length]
        places = first.unsqueeze(1) + torch.arange(length, device=first.device)
        return self.cos[places], self.sin[places]


class LayerCache(NamedTuple):
    """Keys and values of one layer's attention, in pages, as ``attention_with_kv_cache`` has them.

    Attributes:
        k, v: (pages, page size, heads of keys, D).
        seqlens: (B,) int32: keys of each sequence so far.
        page_table: (B, pages of a sequence) int32.
    """

    k: Tensor
    v: Tensor
    seqlens: Tensor
    page_table: Tensor


class PagedCache:
    """Keys and values of all layers, of ``batch`` sequences of up to ``capacity`` tokens; all begin empty."""

    def __init__(
        self, config: TransformerConfig, batch: int, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        pages = -(-capacity // PAGE_SIZE)
        shape = (batch * pages, PAGE_SIZE, config.kv_heads, config.hidden_size // config.num_heads)
        options = {"dtype": torch.int32, "device": device}
        self.seqlens = torch.zeros(batch, **options)
        self.page_table = torch.arange(batch * pages, **options).view(batch, pages)
        self.layers = [
            LayerCache(*torch.empty(2, *shape, dtype=dtype, device=device), self.seqlens, self.page_table)
            for _ in range(config.num_layers)
        ]


class Attention(nn.Module):
    """Causal self-attention of ``num_heads`` heads, with fewer of keys and values if the config says so.

    By ``attention``; by torch's own attention, whose rows may depend on the batch, where the config's
    ``attention_backend`` is "torch". Plain torch takes torch's own, too, for gradients and for head sizes that
    ``attention`` lacks.

    Arguments as of ``MHCTransformer``. Source of the grouped heads: Ainslie et al., GQA, arXiv 2305.13245.
    """

    def __init__(self, config: TransformerConfig, **options) -> None:
        super().__init__()
        c, heads, kv_heads = config.hidden_size, config.num_heads, config.kv_heads
        self.heads = heads, kv_heads
        self.head_size = c // heads
        self.backend, self.by_torch = config.backend, config.attention_backend == "torch"
        options = {"bias": False, "backend": config.backend, **options}
        self.qkv = Linear(c, (heads + 2 * kv_heads) * self.head_size, **options)
        self.out = Linear(c, c, **options)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: LayerCache | None = None) -> Tensor:
        """(B, S, C) from (B, S, C); with a cache of tokens behind those in it, which these are appended to."""
        heads, kv_heads = self.heads
        q, k, v = _SplitRotated.apply(self.qkv(x), *rotation, heads, kv_heads)
        if cache is not None:
            options = {"cache_seqlens": cache.seqlens, "page_table": cache.page_table, "backend": self.backend}
            y = attention_with_kv_cache(q, cache.k, cache.v, k=k, v=v, **options)
        elif self._takes_torchs(q):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads).transpose(1, 2)
        else:
            y = attention(q, k, v, causal=True, backend=self.backend)
        return self.out(y.flatten(2).to(x.dtype))  # under autocast y has its dtype

    def _takes_torchs(self, q: Tensor) -> bool:
        """Whether torch's own attention computes this.

        Raises:
            ValueError, UnsupportedDeviceError: no kernel does, and nobody said that torch's shall.
        """
        if self.by_torch:
            return True
        no_size = self.head_size % 8 or self.head_size > MAX_HEAD_SIZE
        if uses_reference("attention", q, self.backend):
            return bool(no_size) or differentiates(q)  # torch's takes less memory
        if no_size:
            expected = f"be a multiple of 8 up to {MAX_HEAD_SIZE}, or attention_backend 'torch'"
            fail("Attention", "hidden_size / num_heads", expected, self.head_size)
        if differentiates(q) and (arch := _arch_of(q.get_device())) != "sm_90a":
            raise UnsupportedDeviceError(
                f"Attention: has gradients on compute capability 9.0 alone, got {arch}. "
                "Set attention_backend='torch' in the TransformerConfig to attend by torch's own attention"
            )
        return False


@torch.compiler.assume_constant_result
def _arch_of(device_index: int) -> str:
    return launches.target_of(device_index).arch


class _SplitRotated(torch.autograd.Function):
    """q, k and v, (B, S, heads, D), of qkv (B, S, heads and heads D); q and k rotated.

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
        return *qk.split((heads, kv_heads), 2), per_head[:, :, rotates:]

    @staticmethod
    @first_derivative_only
    def backward(ctx, dq, dk, dv):
        cos, sin = ctx.saved_tensors
        heads, kv_heads = ctx.heads
        batch, length, _, size = dq.shape
        dqkv = dq.new_empty((batch, length, heads + 2 * kv_heads, size))
        back = -sin
        _rotate(dq, cos, back, dqkv[:, :, :heads])
        _rotate(dk, cos, back, dqkv[:, :, heads : heads + kv_heads])
        dqkv[:, :, heads + kv_heads :] = dv
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
