"""The kernels that a decoder needs, from its sizes: ``python -m jit_cache prewarm cute_kernels --config FILE``.

The launch code runs on tensors of the meta device, once for each choice that it makes by the number of rows, and what
it asks the builders for is recorded. So the list cannot differ from what a GPU would be asked for by the same calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels.attention.checks import MAX_HEAD_SIZE
from cute_kernels.attention.config import FEW_ROWS, MANY_SPLITS, SHORT, UNBOUNDED, WARPGROUP_ROWS, grid_for
from cute_kernels.attention.launch import attention_append, attention_backward, attention_decode, attention_forward
from cute_kernels.attention.launch.forward import lse_shape
from cute_kernels.gemm.config import EPILOGUE_K, choose
from cute_kernels.gemm.config_grouped import DECODE, MANY_ROWS, ONE_TILE, SOME
from cute_kernels.gemm.config_mxfp8 import DECODE as MXFP8_DECODE
from cute_kernels.gemm.fp32 import product as fp32_product
from cute_kernels.gemm.launch import gemm
from cute_kernels.gemm.launch_grouped import grouped_rows, grouped_sums, grouped_sums_into
from cute_kernels.gemm.launch_mxfp8 import grouped_rows_mxfp8
from cute_kernels.log_prob import launch as log_prob
from cute_kernels.log_prob.config import config_for
from cute_kernels.models.paged import WINDOW_PAGE
from cute_kernels.moe import launch as moe
from cute_kernels.moe.config import OAI
from cute_kernels.moe.prewarm import ALIGNS as EXPERTS_ALIGNS
from cute_kernels.mxfp8 import launch as mxfp8
from cute_kernels.nn.attention import PAGE_SIZE
from cute_kernels.norm import launch as norm
from cute_kernels.reduction import launch as reduction
from cute_kernels.reduction.config import COLUMN_ROWS, MAX_COLUMNS
from cute_kernels.reduction.launch_statistics import log_sum_exp_rows
from cute_kernels.runtime import launches
from cute_kernels.runtime.checks import expect
from cute_kernels.runtime.targets import expect_arch, meta_target, sm_counts
from cute_kernels.sampling.config import MAX_COLUMNS as SAMPLED
from cute_kernels.sampling.config import numbers_of
from cute_kernels.sampling.launch import sample_rows
from cute_kernels.scatter.launch import sum_into_elements, sum_into_rows
from jit_cache import recording

FP32 = torch.float32
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# A field by its names in transformers' configs and, last, in our TransformerConfig
NAMES = {
    "hidden_size": ("hidden_size", "n_embd"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "expert_width": ("moe_intermediate_size",),
    "shared_width": ("shared_expert_intermediate_size",),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token", "num_experts_per_token"),
    "vocab_size": ("vocab_size",),
}
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
ALL_BIASED = ("gpt2", "gpt_neox", "phi", "starcoder2")  # projections have biases, whatever the config says
# Routers whose products transformers computes in fp32
FP32_ROUTERS = ("deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "hunyuan_v1_moe")
SIGMOID = ("deepseek_v3", "glm4_moe")  # their routers have sigmoids, a bias for the selection, and groups
QKV_BIASED = ("qwen2", "qwen2_5_vl_text", "qwen2_vl_text")


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder; 0: there is no such part.

    Attributes:
        dtype: of activations, and of the weights that products take: bf16 or fp16.
        parameter_dtype, norm_dtype: of biases; of the parameters of norms.
        activation: of the MLP, if a product's epilogue has it.
        lengths: numbers of keys and of loss terms, which ``batch_invariant`` adds up.
        num_experts, experts_per_token, expert_width: of ``MoE`` in the place of an MLP, and an expert's channels.
        shared_width: channels of an MLP beside the experts.
        router: score, and whether there is a bias of the selection, groups, those of them that are kept, and whether
            chosen scores are normalised, as of ``RouteSpec``.
        has_oai_experts: experts are as gpt-oss has them: with biases, weights transposed, and a gate of its own; and
            attention has sinks.
        latent: of DeepSeek's attention the ranks of queries, 0 without, and of keys, and the rotary channels of a head.
        head_dim_v: channels of a head of values; 0: as many as of keys.
    """

    hidden_size: int
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    vocab_size: int = 0
    dtype: torch.dtype = torch.bfloat16
    parameter_dtype: torch.dtype = torch.bfloat16
    norm_dtype: torch.dtype = torch.bfloat16
    norm: str = "rms"
    weight_offset: float = 0.0
    activation: str | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    has_conv1d: bool = False  # gpt2's, whose weights are (K, N), in the place of linear layers
    wide_qk_norms: bool = False  # over all heads together, as olmo2's
    has_window: bool = False  # attention does, of some layers
    has_softcap: bool = False  # attention does
    has_logit_softcap: bool = False
    lengths: tuple[int, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    has_fp32_router: bool = False  # of transformers
    shared_width: int = 0
    router: tuple[str, bool, int, int, bool] = ("chosen", False, 1, 1, False)
    has_oai_experts: bool = False
    latent: tuple[int, int, int] = (0, 0, 0)
    head_dim_v: int = 0

    @staticmethod
    def of(config: Mapping[str, Any]) -> Model:
        """From what a JSON file holds: a transformers config of a decoder, or these fields.

        Raises:
            ValueError: naming the field, expected and got.
        """
        config = {**config, **(config.get("text_config") or {})}
        expect(not config.get("is_encoder_decoder"), "prewarm", "config", "be of a decoder", "is_encoder_decoder")
        sizes = {field: _size(config, names) for field, names in NAMES.items()}
        hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        expect(hidden > 0, "prewarm", "config.hidden_size", "be a positive integer", config.get("hidden_size"))
        model_type = config.get("model_type", "")
        if model_type == "gpt2":
            sizes["intermediate_size"] = sizes["intermediate_size"] or 4 * hidden
        sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or heads
        num_experts = _size(config, EXPERTS)
        if num_experts:
            k = sizes["experts_per_token"]
            expect(0 < k <= num_experts, "prewarm", "config.num_experts_per_tok", f"be from 1 to {num_experts}", k)
            sizes["expert_width"] = sizes["expert_width"] or sizes["intermediate_size"]
            expect(sizes["expert_width"] > 0, "prewarm", "config.moe_intermediate_size", "be there with experts", None)
            shared = _size(config, ("n_shared_experts", "num_shared_experts")) * sizes["expert_width"]
            sizes["shared_width"] = sizes["shared_width"] or shared
        else:
            sizes["experts_per_token"] = sizes["expert_width"] = sizes["shared_width"] = 0
        if heads:
            sizes["head_dim"] = sizes["head_dim"] or hidden // heads
        latent = tuple(_size(config, (name,)) for name in LATENT)
        if latent[1]:
            sizes["num_key_value_heads"] = heads
            sizes["head_dim"] = _size(config, ("qk_nope_head_dim",)) + latent[2]
        parameters = _dtype(config, "dtype") or _dtype(config, "torch_dtype") or torch.bfloat16
        layer = "rms_norm_eps" not in config and any(name.startswith("layer_norm_eps") for name in config)
        activation = next((config[n] for n in ("hidden_act", "activation_function") if config.get(n)), None)
        lengths = config.get("lengths", ())
        good = isinstance(lengths, (list, tuple)) and all(type(n) is int and n > 0 for n in lengths)
        expect(good, "prewarm", "config.lengths", "be a list of positive integers", lengths)
        return Model(
            **sizes,
            dtype=torch.bfloat16 if parameters is FP32 else parameters,
            parameter_dtype=parameters,
            norm_dtype=_dtype(config, "norm_dtype") or parameters,
            norm="layer" if layer else "rms",
            weight_offset=1.0 if model_type.startswith("gemma") else 0.0,
            activation=activation if activation in ("silu", "gelu", "relu") else None,
            attention_bias=bool(config.get("attention_bias", model_type in (*ALL_BIASED, *QKV_BIASED))),
            mlp_bias=bool(config.get("mlp_bias", model_type in ALL_BIASED)),
            has_conv1d=model_type == "gpt2",
            wide_qk_norms=model_type.startswith("olmo"),
            has_window=bool(config.get("sliding_window")) and config.get("use_sliding_window", True) is True,
            has_softcap=bool(config.get("attn_logit_softcapping")),
            has_logit_softcap=bool(config.get("final_logit_softcapping")),
            lengths=tuple(lengths),
            num_experts=num_experts,
            has_fp32_router=model_type in FP32_ROUTERS,
            router=_router_of(config, model_type),
            has_oai_experts=model_type == "gpt_oss",
            latent=latent,
            head_dim_v=_size(config, ("v_head_dim",)) if latent[1] else 0,
        )

    @property
    def projections(self) -> Iterator[tuple[int, int, bool, str | None]]:
        """(N, K, whether it has a bias, activation) of each linear layer of a block, apart and fused."""
        c = self.hidden_size
        q, kv = (self.head_dim * n for n in (self.num_attention_heads, self.num_key_value_heads))
        of_q, of_k, rope = self.latent
        if of_k:
            values = self.head_dim_v * self.num_attention_heads
            if of_q:
                yield of_q, c, self.attention_bias, None
            yield q, of_q or c, False, None
            yield of_k + rope, c, self.attention_bias, None
            yield q - rope * self.num_attention_heads + values, of_k, False, None
            yield c, values, self.attention_bias, None
        elif q:
            for n in (q, kv, q + 2 * kv):
                yield n, c, self.attention_bias, None
        for bias in {False, self.attention_bias} if not of_k else ():
            yield c, q or c, bias, None
        for f in {self.intermediate_size, self.shared_width} - {0}:
            for n in (f, 2 * f):
                yield n, c, self.mlp_bias, None
            if self.activation is not None:
                yield f, c, self.mlp_bias, self.activation
            yield c, f, self.mlp_bias, None

    @property
    def widths(self) -> set[int]:
        """Those of norms beside ``hidden_size``: of a head and, of olmo2, of all heads; of latent queries and keys."""
        if self.latent[1]:
            return set(self.latent[:2]) - {0, self.hidden_size}
        heads = (self.num_attention_heads, self.num_key_value_heads) if self.wide_qk_norms else ()
        return {self.head_dim * n for n in (1, *heads)} - {0, self.hidden_size}


def for_config(config: Mapping[str, Any], arch: str) -> list[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel that a model needs in training, prefill and decode, of any number of tokens.

    That is: attention, of dense and packed sequences, and over a cache; linear layers, apart and fused, with and
    without ``main_grad``; norms, with and without a residual stream of the activations' dtype or fp32;
    ``linear_log_prob`` and ``sample``; the embedding's gradient; softmax and log_softmax of the logits; and what
    ``batch_invariant`` runs in place of torch's operators in the same places. Products may choose other kernels on a
    GPU with another number of SMs than ``sm_counts`` names. Experts are those of ``MoE``: a softmax, whose chosen
    weights are normalised, swiglu without biases, also of weights in mxfp8, and what makes these; of gpt_oss,
    deepseek_v3 and glm4_moe as those have them. The router's weights are fp32 where ``dtype`` is. Hyper-connections and
    other quantizers are not among them.

    Args:
        config: a transformers config of a decoder, or some of its fields: ``hidden_size``, and
            ``intermediate_size``, ``num_attention_heads``, ``num_key_value_heads``, ``head_dim``, ``vocab_size``,
            ``dtype``, ``attention_bias``, ``mlp_bias``, ``hidden_act``, ``sliding_window``, ``attn_logit_softcapping``,
            ``final_logit_softcapping``; of experts ``model_type``, ``num_experts``, ``num_experts_per_tok``,
            ``moe_intermediate_size``, ``n_shared_experts``, ``n_group``, ``topk_group``, ``norm_topk_prob``.
            What is not named is left out. Two fields are ours. ``norm_dtype``: of the norms' parameters, ``dtype`` if
            it is not there. ``lengths``: numbers of keys, where attention runs as products and a softmax under
            ``batch_invariant``.
        arch: e.g. ``sm_90a``.

    Raises:
        ValueError: arch has no kernels; a field is wrong, or the model is no decoder.
    """
    expect_arch(arch)
    model = Model.of(config)
    found: dict[tuple[Any, tuple], None] = {}
    for num_sms in sm_counts(arch):
        launches.forget()
        try:
            with meta_target(arch, num_sms), recording() as jobs:
                _run(model, arch, num_sms)
        finally:
            launches.forget()
        found |= dict.fromkeys(jobs)
    return list(found)


def _run(model: Model, arch: str, num_sms: int) -> None:
    """Every launch of the model on one GPU."""
    for n, k, has_bias, activation in dict.fromkeys(model.projections):
        # fp32 ones become the activations' under autocast
        for bias in (model.dtype, model.parameter_dtype) if has_bias else (None,):
            for by_columns in (False, True) if model.has_conv1d else (False,):
                _linear(model, arch, num_sms, n, k, model.dtype, bias, activation, by_columns)
    _norms(model)
    if model.num_experts:
        _experts(model, arch, num_sms)
    if arch == "sm_90a" and model.head_dim and model.head_dim % 8 == 0 and model.head_dim <= MAX_HEAD_SIZE:
        _fused_attention(model, num_sms)
    _whole_sums(model)
    if model.vocab_size:
        for out in (model.dtype, FP32):
            _linear(model, arch, num_sms, model.vocab_size, model.hidden_size, out)
        _log_prob(model, arch, num_sms)
        _indexed(model)
        _sample(model)
    for length in {model.vocab_size, *model.lengths}:
        if 0 < length <= MAX_COLUMNS:  # others are refused
            _softmax(model, length)
    if model.num_attention_heads:
        for length in model.lengths:
            _attention(model, arch, num_sms, length)


def _linear(
    model: Model,
    arch: str,
    num_sms: int,
    n: int,
    k: int,
    out: torch.dtype,
    bias_dtype: torch.dtype | None = None,
    activation: str | None = None,
    by_columns: bool = False,
) -> None:
    """y; dx; dweight and dbias, with ``main_grad`` and without. ``by_columns``: of a weight that is (K, N)."""
    dtype = model.dtype
    weight = _empty(k, n, dtype=dtype).t() if by_columns else _empty(n, k, dtype=dtype)
    bias = None if bias_dtype is None else _empty(n, dtype=bias_dtype)

    def choices(m: int) -> Hashable:
        forward = [choose(arch, m, n, k, num_sms, e, 1, not by_columns) for e in EPILOGUE_K]
        dx = choose(arch, m, k, n, num_sms, "store", 1, by_columns)
        sums = [choose(arch, n, c, m, num_sms, e, 1, False) for e in EPILOGUE_K for c in (k, 1)]
        return *forward, dx, *sums

    for m in _rows(choices, (n, k), num_sms):
        x, y, dx = _empty(m, k, dtype=dtype), _empty(m, n, dtype=out), _empty(m, k, dtype=dtype)
        dy = _empty(m, n, dtype=dtype)
        gemm.function(x, weight, y, None, bias, None, activation)
        if activation in ("silu", "gelu"):
            gemm.function(x, weight, y, torch.empty_like(y), bias, None, activation)
        gemm.function(dy, weight, dx, trans_b=True)
        operands = (x, dy) if by_columns else (dy, x)
        ones = _empty(1, m + -m % 8, dtype=dtype)[:, :m]
        for accumulate in (False, True):
            dweight = torch.empty_like(weight.t() if by_columns else weight, dtype=FP32 if accumulate else dtype)
            gemm.function(*operands, dweight, None, None, None, None, accumulate, True, True)
            if bias is not None:
                dbias = torch.empty_like(bias, dtype=FP32 if accumulate else bias.dtype)
                gemm.function(dy, ones, dbias.unsqueeze(1), None, None, None, None, accumulate, True)
    if bias is not None:
        _column_sums(n, dtype)


def _experts(model: Model, arch: str, num_sms: int) -> None:
    """The router, and a layer of experts of few rows and of many, forward and backward."""
    e, k, c, f, dtype = model.num_experts, model.experts_per_token, model.hidden_size, model.expert_width, model.dtype
    int32, oai = {"dtype": torch.int32}, model.has_oai_experts
    score, has_bias, groups, kept, normalize = model.router
    numbers = normalize, 0.0, 1.0
    logits, indices, weights = _empty(2, e, dtype=FP32), _empty(2, k, **int32), _empty(2, k, dtype=FP32)
    bias = _empty(e, dtype=FP32) if has_bias else None
    moe.moe_route.function(logits, bias, None, indices, weights, score, groups, kept, *numbers)
    moe.moe_route.function(logits, None, indices, indices, weights, score, 1, 1, *numbers)
    moe.moe_route_backward.function(weights, logits, indices, logits, score, *numbers)
    _router_losses(e)
    if model.parameter_dtype is FP32:
        _router(model, arch, num_sms, dtype if dtype is torch.bfloat16 else FP32)
    else:
        _linear(model, arch, num_sms, e, c, FP32)
    _transformers_router(model, arch, num_sms)
    offs = _empty(e, **int32)
    # (E, K, N) each; they lie as (E, N, K), but gpt-oss'
    up, down = (
        _empty(e, *size, dtype=dtype) if oai else _empty(e, *size[::-1], dtype=dtype).mT
        for size in ((c, 2 * f), (f, c))
    )
    up_bias, down_bias = (_empty(e, n, dtype=dtype) if oai else None for n in (2 * f, c))
    gate = ("swiglu", True, *OAI) if oai else ("swiglu", False, None, None)
    for align in EXPERTS_ALIGNS:
        for table in (None, _empty(2, e, **int32)):
            moe.moe_plan.function(indices, table, offs, _empty(2 * k, **int32), indices, offs, align)
    # Rows of an expert by which products choose their kernel
    for mean in (*DECODE, SOME, ONE_TILE, ONE_TILE + 1, MANY_ROWS):
        slots = _empty(mean * e, **int32)
        rows, z, h = (_empty(mean * e, n, dtype=dtype) for n in (c, 2 * f, f))
        given = indices if oai else None, up_bias
        for of_rows in (None, weights) if oai else (None,):
            moe.moe_gather.function(_empty(2, c, dtype=dtype), slots, indices, of_rows, None, rows, None)
        moe.moe_combine.function(rows, indices, weights, indices if oai else None, down_bias, _empty(2, c, dtype=dtype))
        moe.moe_combine.function(rows, indices, None, None, None, _empty(2, c, dtype=dtype))
        moe.moe_gate.function(z, slots if oai else None, *given, h, *gate)
        moe.moe_gate_backward.function(h, z, slots, weights, *given, z, h, weights, *gate)
        for a, b in ((rows, up), (h, down), (rows, down.mT), (z, up.mT)):
            grouped_rows.function(a, b, offs, dtype)
        for a, b in ((h, rows), (rows, z)) if oai else ((rows, h), (z, rows)):
            grouped_sums.function(a.t(), b, offs, dtype)
            grouped_sums_into.function(a.t(), b, offs, _empty(e, a.shape[1], b.shape[1], dtype=FP32))
        for of_bias in (z, rows) if oai else ():
            n = of_bias.shape[1]
            ones = _empty(mean * e, 8, dtype=dtype).t()[:1]
            grouped_sums.function(ones, of_bias, offs, dtype)
            grouped_sums_into.function(ones, of_bias, offs, _empty(e, 1, n, dtype=FP32))
    # Where an expert has one tile, the number of experts counts, too: a rank may have a share of them
    for share in (n for n in range(1, e) if e % n == 0):
        for b in (up, down, down.mT, up.mT):
            rows = _empty(ONE_TILE * share, b.shape[1], dtype=dtype)
            grouped_rows.function(rows, b[:share], offs[:share], dtype)
    if oai:
        _linear(model, arch, num_sms, e, c, FP32)  # rows' products with down_bias
    elif dtype is torch.bfloat16 and not (c % 32 or f % 32):
        _quantized_experts(model)


def _quantized_experts(model: Model) -> None:
    """``MoE.quantize_experts``, and the products of such experts."""
    e, c, f, dtype = model.num_experts, model.hidden_size, model.expert_width, model.dtype
    offs = _empty(e, dtype=torch.int32)
    for n, k in ((2 * f, c), (c, f)):
        for of_weights in {dtype, model.parameter_dtype}:
            mxfp8.quantize.function(
                _empty(e * n, k, dtype=of_weights), torch.float8_e4m3fn, True, False, False, "rceil", "plain"
            )
        q, scale = _empty(e, n, k, dtype=torch.float8_e4m3fn), _empty(e, n, k // 32, dtype=torch.float8_e8m0fnu)
        mxfp8.dequantize.function(q, scale, dtype, False)  # for many rows
        for mean in MXFP8_DECODE:
            grouped_rows_mxfp8.function(_empty(mean * e, k, dtype=dtype), q.mT, scale, offs, dtype)


def _router_losses(num_experts: int) -> None:
    """``load_balancing_loss`` and ``z_loss`` of a router's logits, and their gradients."""
    p = _empty(2, num_experts, dtype=FP32)
    reduction.softmax_forward(p, p, False)
    reduction.softmax_backward(p, p, p, False)
    log_sum_exp_rows(p, _empty(2, dtype=FP32))
    _column_sums(num_experts, FP32)


def _transformers_router(model: Model, arch: str, num_sms: int) -> None:
    """What ``batch_invariant`` runs in a router of transformers: logits, softmax, the chosen weights' sum."""
    e, c, k = model.num_experts, model.hidden_size, model.experts_per_token
    sums = {k}
    if model.has_fp32_router:
        _router(model, arch, num_sms, FP32)
        sum_into_elements.function(_empty(2, k, dtype=FP32), _empty(2, k, dtype=torch.int64), _empty(2, e, dtype=FP32))
        sums.add(2)  # the largest two of a group of experts
    else:
        oai = model.has_oai_experts  # a bias, and a softmax of the chosen logits
        _linear(model, arch, num_sms, e, c, model.dtype, model.parameter_dtype if oai else None)
        # In the router, and of the loss that balances experts
        for logits in (_empty(2, k if oai else e, dtype=model.dtype if oai else FP32), _empty(2, e, dtype=model.dtype)):
            reduction.softmax_forward(logits, logits, False)
            reduction.softmax_backward(logits, logits, logits, False)
        sum_into_elements.function(_empty(2, k, dtype=FP32), _empty(2, k, dtype=torch.int64), _empty(2, e, dtype=FP32))
    for n in sums:
        reduction.sum_rows(_empty(2, n, dtype=FP32), _empty(2, dtype=FP32), 1.0)


def _router(model: Model, arch: str, num_sms: int, x_dtype: torch.dtype) -> None:
    """Logits of fp32 weights, and their gradients: products of parts, six, and three of bf16 activations."""
    e, c = model.num_experts, model.hidden_size
    parts, all_parts = 3 if x_dtype is torch.bfloat16 else 6, 6

    def choices(m: int) -> Hashable:
        sizes = ((m, e, parts * c), (m, c, all_parts * e), (e, c, parts * m))
        return tuple(choose(arch, *mnk, num_sms, epilogue, 1, False) for mnk in sizes for epilogue in EPILOGUE_K)

    for m in _rows(choices, (e, c), num_sms):
        x, weight, logits = _empty(m, c, dtype=x_dtype), _empty(e, c, dtype=FP32), _empty(m, e, dtype=FP32)
        fp32_product(x, weight.t(), FP32)
        fp32_product(logits, weight, x_dtype)
        fp32_product(logits.t(), x, FP32)
        fp32_product(logits.t(), x, FP32, into=weight)


def _norms(model: Model) -> None:
    """The norms of a stream in the activations' dtype or fp32, alone or with a residual; of heads alone."""
    dtype = model.dtype
    # x, residual, y
    streams = [
        (dtype, None, dtype),
        (dtype, dtype, dtype),
        (dtype, FP32, dtype),
        (FP32, None, dtype),
        (FP32, None, FP32),
    ]
    for n in (model.hidden_size, *sorted(model.widths)):
        for x, residual, y in streams if n == model.hidden_size else streams[:1]:
            _norm(model, n, x, residual, y)
        if n == model.latent[1]:
            _norm(model, n, dtype, None, dtype, behind=model.latent[2])
        # Where a norm is written out: the mean of squares, and the gradient of its weight
        reduction.sum_rows(_empty(2, n, dtype=FP32), _empty(2, dtype=FP32), 1.0)
        for of_sums in (dtype, FP32):
            _column_sums(n, of_sums)


def _norm(
    model: Model,
    n: int,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    y_dtype: torch.dtype,
    behind: int = 0,
) -> None:
    """In training, where a gradient of the sum arrives and where none does, with ``main_grad`` and without; alone.

    ``behind``: columns of x that the norm leaves out.
    """
    has_mean = model.norm == "layer"
    weight = _empty(n, dtype=model.norm_dtype)
    bias = _empty(n, dtype=model.norm_dtype) if has_mean else None
    x, y = _empty(2, n + behind, dtype=x_dtype)[:, :n], _empty(2, n, dtype=y_dtype)
    residual = h = None
    if residual_dtype is not None:
        residual, h = (_empty(2, n, dtype=residual_dtype) for _ in range(2))
    statistics = _empty(1 + has_mean, 2, dtype=FP32)
    for kept in ((h, statistics), (h, None), (None, None)):
        norm.norm_forward(x, residual, weight, bias, y, *kept, model.norm, 1e-6, model.weight_offset)
    saved, dx = x if h is None else h, _empty(2, n, dtype=x_dtype)
    dresidual = torch.empty_like(h) if h is not None and h.dtype is not x.dtype else None
    for dh, accumulate in itertools.product((None,) if h is None else (None, h), (False, True)):
        dw, db = (
            None if t is None else torch.empty_like(t, dtype=FP32 if accumulate else t.dtype) for t in (weight, bias)
        )
        results = dx, dresidual, dw, db
        options = model.norm, "input", 1e-6, model.weight_offset, accumulate, accumulate and has_mean
        norm.norm_backward(saved, torch.empty_like(y), dh, weight, None, statistics, *results, *options)


def _log_prob(model: Model, arch: str, num_sms: int) -> None:
    """``linear_log_prob`` of any number of tokens: the width of its parts depends on it, too."""
    k, v, dtype = model.hidden_size, model.vocab_size, model.dtype
    if k % 8:
        return  # refused
    parts = log_prob.GRADIENT_ELEMENTS // log_prob.GRADIENT_COLUMNS

    def choices(m: int) -> Hashable:
        columns = log_prob.gradient_columns(m)
        widths = {min(columns, v), v % columns or min(columns, v)}
        sizes = [mnk for width in widths for mnk in ((m, k, width), (width, k, m))]
        products = frozenset(choose(arch, *mnk, num_sms, e, 1, False) for mnk in sizes for e in EPILOGUE_K)
        return config_for(arch, m), columns >= v, products

    # The last and the first number of tokens of each width
    ends = {m for n in range(1, v // log_prob.GRADIENT_COLUMNS + 2) for m in (parts // n, parts // n + 1)}
    weight = _empty(v, k, dtype=dtype)
    for m in _rows(choices, (k,), num_sms, ends - {0}):
        x, target, row_statistics = _empty(m, k, dtype=dtype), _empty(m, dtype=torch.int64), _empty(m, 3, dtype=FP32)
        g = _empty(m, dtype=FP32)
        numbers = -100, 1.0, 1.0, 1.0 if model.has_logit_softcap else 0.0
        log_prob.log_prob_forward.function(x, weight, target, g, g, row_statistics, None, *numbers)
        for dentropy, accumulate in itertools.product((None, g), (False, True)):
            gradients = torch.empty_like(x), torch.empty_like(weight, dtype=FP32 if accumulate else dtype)
            log_prob.log_prob_backward.function(
                g, dentropy, x, weight, target, row_statistics, None, *gradients, *numbers, accumulate
            )


def _indexed(model: Model) -> None:
    """The gradient of the embedding, what ``main_grad`` gets; those of keys and values that padding has moved."""
    c, dtype = model.hidden_size, model.parameter_dtype
    kept = {model.num_key_value_heads * d for d in (model.head_dim, model.head_dim_v or model.head_dim)}
    for n, source, out, store in (
        (c, dtype, dtype, "write"),
        (c, dtype, FP32, "add"),
        *((n, model.dtype, model.dtype, "onto") for n in kept),
    ):
        if n:
            index = _empty(2, dtype=torch.int64)
            sum_into_rows.function(_empty(2, n, dtype=source), index, _empty(2, n, dtype=out), -1, store)


def _sample(model: Model) -> None:
    """Tokens of logits in fp32 and in the activations' dtype, of all and of some."""
    if model.vocab_size > SAMPLED:
        return  # refused
    integers = _empty(2, dtype=torch.int64)
    for dtype, top_k in itertools.product((model.dtype, FP32), (None, 1)):
        logits, numbers = _empty(2, model.vocab_size, dtype=dtype), numbers_of(1.0, top_k, None, None)
        sample_rows.function(logits, integers, integers, integers, *numbers)


def _softmax(model: Model, n: int) -> None:
    """softmax and log_softmax of rows in the activations' dtype and in fp32, and from one to the other."""
    for x_dtype, y_dtype in ((model.dtype, model.dtype), (FP32, FP32), (model.dtype, FP32)):
        x, y = _empty(2, n, dtype=x_dtype), _empty(2, n, dtype=y_dtype)
        for log in (False, True):
            reduction.softmax_forward(x, y, log)
            reduction.softmax_backward(y, y, x, log)


def _whole_sums(model: Model) -> None:
    """Sums of a loss' terms; norms of gradients, and the norm of these norms."""
    for dtype, squares in ((FP32, False), (FP32, True), (model.parameter_dtype, True)):
        reduction.sum_whole(_empty(1, 2, dtype=dtype), _empty(1, dtype=FP32), 1.0, squares)


def _column_sums(n: int, dtype: torch.dtype) -> None:
    """Sums over rows: of one, of more, of so many that parts are added up."""
    for m in (1, 2, 2 * COLUMN_ROWS):
        reduction.sum_rows(_empty(1, m, n, dtype=dtype), _empty(1, n, dtype=dtype), 1.0)


def _fused_attention(model: Model, num_sms: int) -> None:
    """Forward and backward of sequences, dense, packed, and in a cache of a fixed length; over a cache, contiguous and
    in pages, of packed queries, too.
    """
    dtype, heads, pairs, d = model.dtype, model.num_attention_heads, model.num_key_value_heads, model.head_dim
    dv, int32 = model.head_dim_v or d, {"dtype": torch.int32}
    sinks = _empty(heads, dtype=FP32) if model.has_oai_experts else None
    softcap = 1.0 if model.has_softcap else 0.0
    windows = (-1, 4, SHORT) if model.has_window else (-1,)
    if sinks is not None:
        _column_sums(heads, FP32)  # their gradient, over rows
    starts, used = _empty(3, **int32), _empty(2, **int32)
    # The backward takes steps of 64 and of 80 queries, the forward tiles of 128 and of 192 rows, of windows, too
    for left, length in itertools.product(windows, (64, SHORT, SHORT + 1)):
        q, out = _empty(2, length, heads, d, dtype=dtype), _empty(2, length, heads, dv, dtype=dtype)
        k, v = _empty(2, length, pairs, d, dtype=dtype), _empty(2, length, pairs, dv, dtype=dtype)
        lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": length, "max_seqlen_k": length}
        for packed, options in ((False, {}), (False, {"seqused_k": used}), (True, lengths)):
            rows, keys, values, results = (t.flatten(0, 1) if packed else t for t in (q, k, v, out))
            attention_forward.function(rows, keys, values, True, 1.0, left, -1, softcap, sinks, **options)
            lse = _empty(*lse_shape(rows, packed), dtype=FP32)
            tensors = results, rows, keys, values, results, lse, None
            attention_backward.function(*tensors, True, 1.0, left, -1, softcap, sinks, **options)
    # A token of one sequence, whose splits are CTAs of their own, and more rows, of few splits and of many; chunks of
    # so many that a CTA has all splits of a tile; a prompt whose tiles fill the GPU, by the forward's kernel
    many = MANY_SPLITS + 1
    calls = (1, 1, 2), (1, FEW_ROWS + 1, 2), (1, 1, many), (1, FEW_ROWS + 1, many)
    calls += (4 * num_sms, WARPGROUP_ROWS, 2), (1, 2 * WARPGROUP_ROWS * num_sms, 2)
    lefts = (UNBOUNDED, 4, SHORT) if model.has_window else (UNBOUNDED,)
    # Packed queries are those of transformers' continuous batching, a window's keys then in pages of their own
    layouts = (0, False, lefts), (PAGE_SIZE, False, lefts), (PAGE_SIZE, True, lefts), (WINDOW_PAGE, True, lefts[1:])
    for (batch, queries, splits), (page_size, packed, lefts) in itertools.product(calls, layouts):
        length = splits * grid_for(d).split
        for left in lefts:
            size = page_size or length
            pages = length // size
            keys, values = (_empty(batch * pages, size, pairs, n, dtype=dtype) for n in (d, dv))
            table = _empty(batch, pages, **int32) if page_size else None
            q, out = _empty(batch, queries, heads, d, dtype=dtype), _empty(batch, queries, heads, dv, dtype=dtype)
            starts = _empty(batch + 1, **int32) if packed else None
            q, out = (t.flatten(0, 1) if packed else t for t in (q, out))
            used, lse = _empty(batch, **int32), _empty(*lse_shape(q, packed), dtype=FP32)
            if page_size == PAGE_SIZE:
                new = q[..., :pairs, :], out[..., :pairs, :]
                attention_append.function(*new, keys, values, used, table, starts, queries)
            options = queries, length, page_size == PAGE_SIZE, left, 0, softcap, 1.0
            of_heads = None if sinks is None else sinks.to(model.parameter_dtype)
            attention_decode.function(q, keys, values, used, table, starts, of_heads, out, lse, *options)


def _attention(model: Model, arch: str, num_sms: int, keys: int) -> None:
    """Attention as products and a softmax: of a prompt and of a token, forward; of a sequence, backward."""
    heads, d, dtype = model.num_attention_heads, model.head_dim, model.dtype

    def choices(queries: int, batch: int) -> Hashable:
        sizes = itertools.product(itertools.permutations((queries, keys, d)), (True, False))
        return tuple(choose(arch, *mnk, num_sms, "store", heads * batch, along_k) for mnk, along_k in sizes)

    for queries in {1, keys}:
        batches = {choices(queries, batch): batch for batch in range(256, 0, -1)}
        for batch in batches.values():
            entries = heads * batch
            q, k, p = (_empty(entries, *s, dtype=dtype) for s in ((queries, d), (keys, d), (queries, keys)))
            v, out = k, q
            for a, b, result in (
                (q, k.mT, p),
                (p, v, out),
                (out, v.mT, p),  # dp
                (p.mT, out, v),  # dv
                (p, k, q),  # dq
                (q.mT, p, _empty(entries, d, keys, dtype=dtype)),  # dk, transposed
            )[: 2 if queries < keys else None]:
                gemm.function(a, b, result, trans_b=True)


def _rows(
    choices: Callable[[int], Hashable], widths: tuple[int, ...], num_sms: int, more: Iterable[int] = ()
) -> list[int]:
    """Numbers of rows that between them meet every choice that depends on them; ``widths``: of the products' results.

    Tiles end at multiples of 128 rows where there are more than 512 rows and columns, of 16 where there are not. From
    64 tiles of 128 x 256 a CTA on, the kernel of the least time a tile wins whatever the number. Where the rows are
    summed over, powers of two do.
    """
    last = max([2**15, *(64 * num_sms * 2**15 // width for width in widths if width > 256)])
    wide = {*range(1, 513), *range(640, last + 1, 128), *(2**i for i in range(16, 25)), *more}
    found: set[int] = set()
    for lattice in (wide, range(528, 4096, 16)):  # apart, or the second would have the place of the first's multiples
        found |= {*{(choices(m), m % 64 == 0): m for m in sorted(lattice, reverse=True)}.values()}
    # One that is no multiple of anything has the choices of the multiple above it
    return sorted(found | {m - 1 for m in found if m > 512})


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _size(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        return 0
    good = type(config[name]) is int and config[name] > 0
    expect(good, "prewarm", f"config.{name}", "be a positive integer", repr(config[name]))
    return config[name]


def _router_of(config: Mapping[str, Any], model_type: str) -> tuple[str, bool, int, int, bool]:
    """``Model.router``."""
    if model_type not in SIGMOID:
        return "chosen", False, 1, 1, False
    groups, kept = _size(config, ("n_group",)) or 1, _size(config, ("topk_group",)) or 1
    return "sigmoid", True, groups, kept, bool(config.get("norm_topk_prob", True))


def _dtype(config: Mapping[str, Any], name: str) -> torch.dtype | None:
    value = config.get(name)
    if value in (None, "auto"):
        return None
    found = DTYPES.get(str(value).removeprefix("torch."))
    expect(found is not None, "prewarm", f"config.{name}", f"be of {', '.join(DTYPES)}", repr(value))
    return found
