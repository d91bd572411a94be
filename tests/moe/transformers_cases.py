"""Small random models of the transformers package with experts."""

import torch
import transformers

from cute_kernels import moe
from cute_kernels.models import register_transformers

SIZES = dict(
    vocab_size=96,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
LATENT = dict(kv_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=64)
CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, intermediate_size=48, num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES,
        intermediate_size=48,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default"},
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4, "head_dim": 32},
        **LATENT,
        intermediate_size=96,
        moe_intermediate_size=48,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **SIZES,
        intermediate_size=96,
        moe_intermediate_size=48,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        use_qk_norm=True,
    ),
}


def make_model(name, experts, device="cpu", dtype=torch.float32, attention="cute_kernels"):
    moe.register_with_transformers()
    register_transformers()
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config._attn_implementation = attention
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():  # biases, too, and routers with a spread
            if "norm" not in key:
                parameter.copy_(torch.randn(parameter.shape) * 0.12)
    model.set_experts_implementation(experts)
    return model.to(device=device, dtype=dtype)


def tokens(*shape, device="cpu"):
    return torch.randint(2, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(0)).to(device)
