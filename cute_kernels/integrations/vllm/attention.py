"""vLLM's attention backend CUSTOM: ``attention_with_kv_cache`` over its pages.

A layer's cache is (pages, key-value heads, page size, D + Dv) in any order of memory: a key and its value are
neighbours. vLLM's own copy writes new keys and values to their slots before ``forward``; it changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from cute_kernels import attention_with_kv_cache
from cute_kernels.integrations.vllm.covered import check_config

CACHE_DTYPES = {"auto": None, "float16": torch.float16, "bfloat16": torch.bfloat16}


class CuteKernelsBackend(AttentionBackend):
    """The answers that vLLM wants of a backend first. Encoders, MLA, alibi and non-causal masks keep its "no"."""

    supported_dtypes = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes = list(CACHE_DTYPES)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks the layer's backend up by it

    @staticmethod
    def get_impl_cls() -> type[CuteKernelsImpl]:
        return CuteKernelsImpl

    @staticmethod
    def get_builder_cls() -> type[CuteKernelsMetadataBuilder]:
        return CuteKernelsMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [16, 32, 64, MultipleOf(128)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 0 < head_size <= 256 and head_size % 8 == 0

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major == 9

    @classmethod
    def supports_combination(cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *rest: Any) -> Any:
        """Why not, or None."""
        if CACHE_DTYPES.get(kv_cache_dtype or "auto") not in (None, dtype):
            return f"kv_cache_dtype must be auto or the model's {dtype}, got {kv_cache_dtype}"
        return None


@dataclass
class CuteKernelsMetadata(AttentionMetadata):
    """A step's sequences, for all layers of a group.

    Attributes:
        num_actual_tokens: queries, without those that pad the step.
        max_query_len: of the longest sequence in this step.
        query_start_loc: (B + 1,) int32.
        max_seq_len: keys of the longest sequence, or more.
        seq_lens: (B,) int32, keys of each sequence with those of this step.
        block_table: (B, pages of a sequence) int32.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor


class CuteKernelsMetadataBuilder(AttentionMetadataBuilder[CuteKernelsMetadata]):
    """From vLLM's step to ``CuteKernelsMetadata``."""

    _cudagraph_support = AttentionCGSupport.NEVER  # not tried

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> CuteKernelsMetadata:
        step = common_attn_metadata
        if step.causal is not True:
            raise ValueError(f"{CuteKernelsBackend.get_name()}: causal must be True, got {step.causal}")
        return CuteKernelsMetadata(
            step.num_actual_tokens,
            step.max_query_len,
            step.query_start_loc,
            step.max_seq_len,
            step.seq_lens,
            step.block_table_tensor,
        )


class CuteKernelsImpl(AttentionImpl[CuteKernelsMetadata]):
    """A layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        name = CuteKernelsBackend.get_name()
        if alibi_slopes is not None:
            raise ValueError(f"{name}: alibi_slopes must be None, got {len(alibi_slopes)} slopes")
        if kv_cache_dtype not in CACHE_DTYPES:
            raise ValueError(f"{name}: kv_cache_dtype must be of {', '.join(CACHE_DTYPES)}, got {kv_cache_dtype}")
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"{name}: attn_type must be {AttentionType.DECODER.value}, got {attn_type}")
        check_config()
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.window = None if sliding_window is None else (sliding_window - 1, 0)
        self.softcap = float(logits_soft_cap or 0.0)
        self.sinks = sinks

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Copies (tokens, heads, D) and (tokens, heads, Dv) to their slots; a slot of -1 is none."""
        k_cache, v_cache = self._caches(kv_cache)
        _custom_ops.reshape_and_cache_flash(
            key, value, k_cache, v_cache, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CuteKernelsMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes (tokens, heads, Dv) to ``output`` and returns it; rows that pad the step stay as they are."""
        if output_scale is not None or output_block_scale is not None:
            raise ValueError(f"{CuteKernelsBackend.get_name()}: output_scale must be None: there is no fp8 output")
        if attn_metadata is None:  # vLLM measures its memory
            return output.fill_(0)
        k_cache, v_cache = self._caches(kv_cache)
        table, tokens = attn_metadata.block_table, attn_metadata.num_actual_tokens
        attention_with_kv_cache(
            query[:tokens],
            k_cache,
            v_cache,
            cache_seqlens=attn_metadata.seq_lens,
            page_table=table,
            cu_seqlens_q=attn_metadata.query_start_loc,
            max_seqlen_q=attn_metadata.max_query_len,
            max_seqlen_k=min(attn_metadata.max_seq_len, table.shape[1] * k_cache.shape[1]),
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            scale=self.scale,
            out=output[:tokens],
        )
        return output

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """(pages, page size, heads, D) of keys and (..., Dv) of values."""
        places = kv_cache.transpose(1, 2)
        return places[..., : self.head_size], places[..., self.head_size :]
