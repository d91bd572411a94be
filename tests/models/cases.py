"""Small random models of the transformers package, and what is compared of them."""

import torch
import transformers

from cute_kernels.models import prepare, register_transformers
from tests.moe.transformers_cases import CONFIGS as OF_EXPERTS

SIZES = dict(
    vocab_size=96,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
HEADS_OF_192 = dict(qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, head_dim=64)
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
WINDOW = 6
HALF_SLIDING = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, **HALF_SLIDING, query_pre_attn_scalar=64, attn_logit_softcapping=20.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, **HALF_SLIDING, query_pre_attn_scalar=64),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, **HALF_SLIDING, num_local_experts=4, num_experts_per_tok=2, rope_parameters={"rope_type": "default"}
    ),
}

# Those of ``models.prepare``
FAMILIES = {
    **{name: CONFIGS[name] for name in ("llama", "qwen3", "mistral", "gemma3")},
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, **HALF_SLIDING, query_pre_attn_scalar=64, attn_logit_softcapping=20.0, final_logit_softcapping=5.0
    ),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "phi3": lambda: transformers.Phi3Config(**SIZES),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "granite": lambda: transformers.GraniteConfig(**SIZES, logits_scaling=4.0, attention_multiplier=0.1),
    "glm4": lambda: transformers.Glm4Config(**SIZES),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=SIZES["vocab_size"], n_embd=128, n_layer=2, n_head=2, n_inner=192, **NO_DROPOUT
    ),
    **OF_EXPERTS,
    "deepseek_v3, heads of 192 and 128": lambda: transformers.DeepseekV3Config(
        **{**OF_EXPERTS["deepseek_v3"]().to_dict(), **HEADS_OF_192}
    ),
}


def make_prepared(name, device="cpu", dtype=torch.bfloat16, **options):
    return prepare(make_model(name, device, dtype, configs=FAMILIES), **options)


def make_model(name, device="cpu", dtype=torch.float32, implementation="cute_kernels", configs=None):
    register_transformers()
    torch.manual_seed(0)
    config = (configs or CONFIGS)[name]()
    config._attn_implementation = implementation
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():  # biases and sinks, too, and scores with a spread
            if "norm" not in key:
                parameter.copy_(torch.randn(parameter.shape) * (2.0 if "sinks" in key else 0.12))
    return model.to(device=device, dtype=dtype).eval()


def prompts(lengths=(9, 4, 7), seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, SIZES["vocab_size"], (n,), generator=generator).to(device) for n in lengths]


def padded(rows, left):
    """(input_ids, attention_mask) of rows of other lengths."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.int64, device=rows[0].device)
    present = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(longest - len(row), longest) if left else slice(0, len(row))
        ids[i, place], present[i, place] = row, 1
    return ids, present


@torch.no_grad()
def alone(model, row):
    """Logits (S, vocabulary) of one forward of one sequence."""
    return model(row[None], use_cache=False).logits[0]


@torch.no_grad()
def generated(model, rows, tokens, **options):
    """[(tokens, logits of the new ones)] of a greedy generate from a batch of prompts, padded left."""
    ids, present = padded(rows, left=True)
    found = model.generate(
        ids,
        attention_mask=present,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **{"disable_compile": True, **options},
    )
    logits = torch.stack(found.logits, 1)
    return [(found.sequences[i, ids.shape[1] - len(row) :], logits[i]) for i, row in enumerate(rows)]
