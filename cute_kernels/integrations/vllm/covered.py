"""A check of vLLM's configuration: an option that is not covered is an error that names it."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.v1.attention.backends.registry import AttentionBackendEnum


def check_config() -> None:
    """Raise ValueError if vLLM builds a model of whose kernels some would be neither this library's nor counted.

    Layers call it when they are built. Without a configuration, as in a test of one layer, nothing is checked.
    """
    config = get_current_vllm_config_or_none()
    if config is None:
        return
    model = config.model_config
    _expect(config.attention_config.backend, AttentionBackendEnum.CUSTOM, "attention_config.backend")
    _expect(dict(config.attention_config.backend_per_kind), {}, "attention_config.backend_per_kind")
    _expect(config.compilation_config.mode, CompilationMode.NONE, "compilation_config.mode (see enforce_eager)")
    _expect(config.compilation_config.cudagraph_mode, CUDAGraphMode.NONE, "compilation_config.cudagraph_mode")
    _expect(config.parallel_config.tensor_parallel_size, 1, "parallel_config.tensor_parallel_size")
    _expect(config.kernel_config.linear_backend, "auto", "kernel_config.linear_backend")
    _expect(config.lora_config, None, "lora_config")
    _expect(config.speculative_config, None, "speculative_config")
    _expect(model.quantization, None, "model_config.quantization")
    _expect(model.is_moe, False, "model_config.is_moe")
    _expect(model.is_hybrid, False, "model_config.is_hybrid")
    _expect(model.is_multimodal_model, False, "model_config.is_multimodal_model")


def _expect(got: Any, wanted: Any, name: str) -> None:
    if got != wanted:
        raise ValueError(f"cute_kernels in vLLM: {name} must be {wanted}, got {got}")
