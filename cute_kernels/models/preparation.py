"""prepare: a model of transformers computes by this library, and says what of it cannot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cute_kernels import moe
from cute_kernels.models.attention import NAME, PAGES, register_transformers
from cute_kernels.models.families import family_of, frequencies_of, head_of, model_of
from cute_kernels.nn import RMSNorm
from cute_kernels.runtime.checks import fail

OP = "models.prepare"
Model = TypeVar("Model", bound=nn.Module)


class HeadsNorm(RMSNorm):
    """RMSNorm that also takes (B, heads, S, D) which lies as (B, S, heads, D), as attention's norms are given it."""

    def forward(self, x, residual=None):
        if x.dim() == 4 and not x.is_contiguous():
            return super().forward(x.transpose(1, 2), residual).transpose(1, 2)
        return super().forward(x, residual)


def prepare(model: Model, *, norms: bool = True, log_prob: bool = True, strict: bool = True) -> Model:
    """Let a causal language model of transformers attend by ``attention``, and check that its rows can be invariant.

    Where it has experts, they are ``moe.experts``. Frequencies of rotary embeddings that ``.to(dtype)`` has rounded are
    fp32 again.

    Prepare both sides of a comparison, trainer and roll-out, alike: ``norms`` changes bits.

    Args:
        model: a causal language model of transformers, version 5, or peft's model of one. It is changed in place.
        norms: replace its RMSNorms by ``nn.RMSNorm``, which share the weights: one kernel, and one rounding less
            where the model rounds before it multiplies by the weight.
        log_prob: check that ``log_prob`` and ``generate`` know its head.
        strict: False: only let it attend by ``attention``, whatever the model; no norms, no checks.

    Returns:
        The model.

    Raises:
        ImportError: transformers is not installed, or older.
        TypeError: no model of transformers.
        ValueError: a model_type that is not known; rotary embeddings whose frequencies depend on the longest sequence
            of the batch (rope_type "dynamic", and "longrope" beyond the original length); dropout, or noise on what
            a router sees; a head with a bias; peft's model with prompt or prefix tuning.

    Example:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from cute_kernels import models
        >>> config = LlamaConfig(
        ...     vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1
        ... )
        >>> model = models.prepare(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
        >>> model.config._attn_implementation, type(model.model.norm).__name__
        ('cute_kernels', 'HeadsNorm')
    """
    register_transformers()
    found = model_of(OP, model)
    if strict:
        family = family_of(OP, found)
        _check_positions(found.config)
        _check_dropout(found)
        if log_prob:
            head_of(OP, found)
        _restore_frequencies(found)
    found.set_attn_implementation(NAME)
    if strict and family.has_experts:
        moe.register_with_transformers()
        found.set_experts_implementation(NAME)
    if strict and family.has_latents:
        _keep_pages(found)
    if strict and norms and family.weight_offset is not None:
        _swap_norms(found, family.weight_offset)
    return model


def _check_positions(config: Any) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    by_kind = [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    for some in by_kind:
        kind, original = some.get("rope_type", "default"), some.get("original_max_position_embeddings")
        beyond = original is None or config.max_position_embeddings > original
        if kind == "dynamic" or (kind == "longrope" and beyond):
            expected = "have frequencies that do not depend on the batch's longest sequence"
            fail(OP, "model's rotary embedding", expected, f"rope_type {kind!r}")


def _restore_frequencies(model: Any) -> None:
    """Compute frequencies of rotary embeddings again which ``.to(dtype)`` has rounded.

    A model that is loaded in bf16 has them in fp32, and so has one that autocast or FSDP2 lets compute in bf16.
    """
    if all(buffer.dtype is torch.float32 for buffer in frequencies_of(model).values()):
        return
    rotary = model.base_model.rotary_emb
    fresh = dict(type(rotary)(rotary.config).named_buffers(recurse=False))
    for name, buffer in frequencies_of(model).items():
        rotary.register_buffer(name, fresh[name].to(buffer.device), persistent=False)


def _check_dropout(model: Any) -> None:
    for name, module in model.named_modules():
        p = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        if isinstance(p, float) and p > 0.0:
            fail(OP, "model's dropout", "be 0: it is drawn by place in the batch", f"{p} in {name}")
        jitter = getattr(module, "jitter_noise", 0.0)  # mixtral's
        if isinstance(jitter, float) and jitter > 0.0:
            expected = "be 0: training draws it by place in the batch"
            fail(OP, "config's router_jitter_noise", expected, f"{jitter} in {name}")


def _keep_pages(model: nn.Module) -> None:
    """Let keys that ``expand_kv`` makes of a PagedCache's latents name the cache's layer, as the latents do."""
    for module in model.modules():
        if hasattr(module, "expand_kv") and not isinstance(module.expand_kv, partial):
            module.expand_kv = partial(_expand, module.expand_kv)


def _expand(expand_kv: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], nope: Tensor, rope: Tensor):
    keys, values = expand_kv(nope, rope)
    if hasattr(nope, PAGES):
        setattr(keys, PAGES, getattr(nope, PAGES))
    return keys, values


def _swap_norms(model: nn.Module, weight_offset: float) -> None:
    """Replace modules of transformers' classes called ...RMSNorm, which have a weight and an eps."""
    for parent in list(model.modules()):
        for name, old in list(parent.named_children()):
            if not type(old).__name__.endswith("RMSNorm") or isinstance(old, RMSNorm):
                continue
            eps = old.variance_epsilon if hasattr(old, "variance_epsilon") else old.eps  # type: ignore[union-attr]
            new = HeadsNorm(old.weight.shape[0], eps=eps, weight_offset=weight_offset, device="meta")
            new.weight = old.weight
            new.train(old.training)
            setattr(parent, name, new)
