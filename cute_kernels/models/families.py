"""The families of models that are known: how their norms weigh, and what their logits are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cute_kernels.runtime.checks import fail


class Family(NamedTuple):
    """``weight_offset``: of its RMSNorms, None where it has none; ``has_experts``: of some layers.

    ``has_latents``: its cache is given latent keys and values, which a layer's ``expand_kv`` makes those of heads of.
    """

    weight_offset: float | None = 0.0
    has_experts: bool = False
    has_latents: bool = False


# By the config's model_type
FAMILIES = {
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "mistral": Family(),
    "phi3": Family(),
    "olmo2": Family(),
    "granite": Family(),
    "glm4": Family(),
    "gemma2": Family(1.0),
    "gemma3_text": Family(1.0),
    "gpt2": Family(None),
    "mixtral": Family(has_experts=True),
    "qwen3_moe": Family(has_experts=True),
    "gpt_oss": Family(has_experts=True),
    "deepseek_v3": Family(has_experts=True, has_latents=True),
    "glm4_moe": Family(has_experts=True),
}
# Why others are not among them
STATES = "linear attention and state spaces are not covered"
REFUSED = dict.fromkeys(("qwen3_next", "falcon_h1", "mamba", "mamba2"), STATES)


class Head(NamedTuple):
    """Logits are ``softcap * tanh(scale * x weight^T / softcap)``, without a softcap ``scale * x weight^T``."""

    weight: Tensor
    scale: float
    softcap: float


def model_of(op: str, model: nn.Module) -> Any:
    """The model of transformers: itself, or what peft has wrapped.

    Raises:
        TypeError: it is none.
        ValueError: peft's prompt learning (its config's ``is_prompt_learning``): prompt, prefix or P-tuning puts
            tokens or keys before the sequence, which the model of transformers itself knows nothing of. A result of
            torch.compile: only its forward is compiled, and not what is called here, the model's ``base_model``.
    """
    if hasattr(model, "_orig_mod"):
        expected = "not come from torch.compile: its layers would run eagerly; call model.base_model.compile() instead"
        fail(op, "model", expected, "one that does")
    adapter = getattr(model, "active_peft_config", None) if hasattr(model, "get_base_model") else None
    if getattr(adapter, "is_prompt_learning", False):
        fail(
            op, "model's adapter", "be in its layers, as LoRA's: a learned prompt would be lost", type(adapter).__name__
        )
    found = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not (hasattr(found, "get_output_embeddings") and hasattr(found, "config") and hasattr(found, "base_model")):
        fail(op, "model", "be a causal language model of transformers", type(model).__name__, TypeError)
    return found


def family_of(op: str, model: Any) -> Family:
    """Its family.

    Raises:
        ValueError: its model_type is not known.
    """
    name = model.config.model_type
    if name not in FAMILIES:
        why = f": {REFUSED[name]}" if name in REFUSED else ""
        fail(op, "model", f"be of a model_type in {', '.join(FAMILIES)}", f"{name!r}{why}")
    return FAMILIES[name]


def head_of(op: str, model: Any) -> Head:
    """How the hidden states of a known model become logits.

    Raises:
        ValueError: the family is not known, or the head is no matrix alone (a bias, an adapter).
    """
    family_of(op, model)
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        fail(op, "model's output embedding", "be a linear layer", type(head).__name__)
    if head.bias is not None:
        fail(op, "model's output embedding", "have no bias", "one that has")
    config = model.config
    scale = 1.0 / getattr(config, "logits_scaling", 1.0)
    return Head(head.weight, scale, getattr(config, "final_logit_softcapping", None) or 0.0)


def frequencies_of(model: Any) -> dict[str, Tensor]:
    """The buffers of a model's rotary embedding, by name; none where it has no such."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    return {} if rotary is None else dict(rotary.named_buffers(recurse=False))


def expect_frequencies(op: str, model: Any) -> None:
    """Raise ValueError where ``.to(dtype)`` has rounded the frequencies, which autocast and FSDP2 do not."""
    for name, buffer in frequencies_of(model).items():
        if buffer.is_floating_point() and buffer.dtype is not torch.float32:
            expected = "be in fp32, as a trainer's: prepare the model again after .to(dtype)"
            fail(op, f"model's rotary {name}", expected, buffer.dtype)
