"""Models of sizes that are trained, with random weights: a roll-out has the bits of one forward, in any batch."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from cute_kernels import batch_invariant, models  # noqa: E402
from tests.models.cases import padded  # noqa: E402
from tests.runtime.bits import assert_same_bits  # noqa: E402

pytestmark = [pytest.mark.sm90, pytest.mark.slow]
LENGTHS = (1, 2049, 130)
NEW = 4
SIZES = dict(num_attention_heads=32, num_key_value_heads=8, rms_norm_eps=1e-6, eos_token_id=None, pad_token_id=0)
# Llama 3.2 1B and Qwen3 8B
CONFIGS = {
    "llama of 1B": lambda: transformers.LlamaConfig(
        **SIZES, vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64
    ),
    "qwen3 of 8B": lambda: transformers.Qwen3Config(
        **SIZES, vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, head_dim=128
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_roll_out_is_scored_alike(name, device):
    """A prompt that passes a split of keys beside short ones; in reverse with steps from a graph, and with guesses."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        rows = [torch.randint(1, config.vocab_size, (length,)) for length in LENGTHS]
        seeds = torch.arange(len(rows))
    models.prepare(model.eval())
    ids, present = padded(rows, left=True)
    options = {"max_new_tokens": NEW, "temperature": 0.7, "eos_token_id": []}
    with batch_invariant("strict"), torch.no_grad():
        found = models.generate(model, ids, seeds=seeds, attention_mask=present, **options)
        for row, tokens, log_probs in zip(rows, found.tokens, found.log_probs, strict=True):
            whole = torch.cat([row, tokens])[None]
            scored, _ = models.log_prob(model, whole, whole, temperature=0.7)
            assert_same_bits(scored[0, len(row) :], log_probs)
        for other in ({"graph": True}, {"speculate": 3}):
            again = models.generate(
                model, ids.flip(0), seeds=seeds.flip(0), attention_mask=present.flip(0), **options, **other
            )
            assert torch.equal(again.tokens.flip(0), found.tokens)
            assert_same_bits(again.log_probs.flip(0), found.log_probs)
