"""A check of vLLM's configuration: an option that is not covered is an error that names it."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.v1.attention.backends.registry import AttentionBackendEnum

MIXTURES = "glm4_moe", "gpt_oss", "mixtral", "qwen3_moe"  # model_types whose layers of experts were read


def check_config() -> None:
    """Raise ValueError if vLLM builds a model of whose kernels some would be neither this library's nor counted.

    Layers call it when they are built. Without a configuration, as in a test of one layer, nothing is checked.
    """
    config = get_current_vllm_config_or_none()
    if config is None:
        return
    model = config.model_config
    expect(config.attention_config.backend, AttentionBackendEnum.CUSTOM, "attention_config.backend")
    expect(dict(config.attention_config.backend_per_kind), {}, "attention_config.backend_per_kind")
    expect(config.compilation_config.mode, CompilationMode.NONE, "compilation_config.mode (see enforce_eager)")
    expect(config.compilation_config.cudagraph_mode, CUDAGraphMode.NONE, "compilation_config.cudagraph_mode")
    expect(config.parallel_config.tensor_parallel_size, 1, "parallel_config.tensor_parallel_size")
    expect(config.kernel_config.linear_backend, "auto", "kernel_config.linear_backend")
    expect(config.lora_config, None, "lora_config")
    expect(config.speculative_config, None, "speculative_config")
    expect(model.quantization, None, "model_config.quantization")
    expect(model.is_hybrid, False, "model_config.is_hybrid")
    expect(model.is_multimodal_model, False, "model_config.is_multimodal_model")
    if not model.is_moe:
        return
    kind = model.hf_text_config.model_type
    if kind not in MIXTURES:
        raise ValueError(
            f"cute_kernels in vLLM: a model_type with experts must be of {', '.join(MIXTURES)}, got {kind}"
        )
    expect(config.parallel_config.enable_expert_parallel, False, "parallel_config.enable_expert_parallel")
    expect(config.parallel_config.data_parallel_size, 1, "parallel_config.data_parallel_size")
    expect(config.parallel_config.prefill_context_parallel_size, 1, "parallel_config.prefill_context_parallel_size")
    expect(config.kernel_config.moe_backend, "auto", "kernel_config.moe_backend")


def expect(got: Any, wanted: Any, name: str) -> None:
    """Raise ValueError unless an option of vLLM is what is covered."""
    if got != wanted:
        raise ValueError(f"cute_kernels in vLLM: {name} must be {wanted}, got {got}")
