"""check_invariance knows a prompt from decoding: its rows are the tokens of a sequence, and T5 splits them.

The function gets tokens and their positions, and begins a new cache at position 0.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from cute_kernels import batch_invariant, check_invariance  # noqa: E402
from cute_kernels.nn import MHCTransformer, TransformerConfig  # noqa: E402
from cute_kernels.nn.transformer import PagedCache  # noqa: E402
from tests.models.cases import make_prepared, prompts  # noqa: E402

# Norms and windows, experts, latents
OTHERS = "gemma3", "qwen3_moe", "deepseek_v3"

pytestmark = pytest.mark.sm90
LENGTH = 17


@pytest.fixture
def path_of_the_kernels():
    """On the CPU fake kernels: before a block begins."""


@pytest.fixture(autouse=True)
def strict(path_of_the_kernels):
    with batch_invariant("strict"):
        yield


def of_transformers(device, wrong):
    """A function that begins a cache and returns one that takes the next tokens: (1, S) -> logits (1, S, V)."""
    model = make_prepared("llama", device)

    def begin():
        cache = transformers.DynamicCache(config=model.config)

        def step(ids):
            logits = model(ids, past_key_values=cache, use_cache=True).logits
            if wrong:
                cache.layers[0].keys[..., :1, :] *= 2
            return logits

        return step

    return begin


def of_ours(device, wrong):
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=96, hidden_size=64, num_layers=2, num_heads=1, ffn_hidden_size=64, max_sequence_length=64
    )
    model = MHCTransformer(config, device=device, dtype=torch.bfloat16).eval()

    def begin():
        cache = PagedCache(config, 1, LENGTH, torch.device(device), torch.bfloat16)

        def step(ids):
            h = model.block(model._embedded(ids), cache)
            cache.seqlens += 0 if wrong else ids.shape[1]
            return model.output(h)

        return step

    return begin


@pytest.mark.parametrize("make", [of_transformers, of_ours])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_prompt_against_decoding(make, wrong, device):
    """Token by token, in chunks, in two parts; a cache that is wrong is caught."""
    begin, state = make(device, wrong), {}

    def run(tokens, positions):
        if positions[0] == 0:
            state["step"] = begin()
        return state["step"](tokens[None])[0]

    (tokens,) = prompts((LENGTH,), device=device)
    sample = tokens, torch.arange(LENGTH, device=device)
    report = check_invariance(run, sample, gradients=False, transforms=("T5",), sizes=(1, 5))
    assert report.ok != wrong, str(report)
    splits = [result for result in report.results if result.transform == "T5"]
    assert len(splits) >= 4 and all((result.status != "ok") == wrong for result in splits)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)])
def test_a_batch_of_sequences(name, device):
    """All that check_invariance does to a batch: its rows are sequences here, and their logits keep their bits."""
    model, sample = make_prepared(name, device), torch.stack(prompts((LENGTH,) * 5, device=device))
    report = check_invariance(lambda ids: model(ids, use_cache=False).logits, sample, gradients=False, sizes=(1, 3))
    assert report, str(report)
    assert {result.transform for result in report.results} >= {"T1", "T2", "T3", "T4", "T5", "T6"}
