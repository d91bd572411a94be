"""A hundred steps of reinforcement learning: roll-outs in other batches have the bits of training."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

from tests.examples.test_examples import main_of  # noqa: E402
from tests.models.cases import generated, make_model, prompts  # noqa: E402
from tests.runtime.bits import assert_same_bits  # noqa: E402

pytestmark = pytest.mark.sm90


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_a_hundred_steps(name):
    """Log-probabilities and entropies at each step; a second run, which replays graphs, has the same weights."""
    train = main_of("rl_100_steps").train
    runs = [train(100, "cuda", name, by) for by in ("batches", "graph")]
    assert [mismatches for mismatches, _ in runs] == [0, 0]
    for a, b in zip(*(model.parameters() for _, model in runs), strict=True):
        assert_same_bits(a.detach(), b.detach())


@pytest.mark.slow
def test_prompts_in_chunks():
    """By continuous batching, which cuts prompts: the same weights."""
    train = main_of("rl_100_steps").train
    runs = [train(10, "cuda", "qwen3", by) for by in ("batches", "chunks")]
    assert [mismatches for mismatches, _ in runs] == [0, 0]
    for a, b in zip(*(model.parameters() for _, model in runs), strict=True):
        assert_same_bits(a.detach(), b.detach())


def test_plain_torch_differs():
    """Without ``prepare`` and a block: cuBLAS and torch's attention give a batch's decoding other bits."""
    model = make_model("qwen3", "cuda", torch.bfloat16, "sdpa")
    rows, differ = prompts((40, 3, 17), device="cuda"), 0
    for row, (tokens, logits) in zip(rows, generated(model, rows, 16), strict=True):
        with torch.no_grad():
            wanted = model(tokens[None], use_cache=False).logits[0, len(row) - 1 : -1]
        differ += (logits.to(wanted.dtype) != wanted).any(1).sum().item()
    assert differ > 0
