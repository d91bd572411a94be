"""Models that FSDP2 shards, on one rank: log-probabilities, gradients and roll-outs of those that it does not."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

import torch.distributed as dist  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from cute_kernels import install, models, uninstall  # noqa: E402
from tests.models.cases import padded, prompts  # noqa: E402
from tests.models.sharding_cases import OPTIONS, make, scored  # noqa: E402
from tests.runtime.bits import assert_same_bits  # noqa: E402

pytestmark = pytest.mark.sm90


@pytest.fixture
def covered():
    """On the CPU fake kernels and a block; here a backward's sums over ranks, too."""
    install("strict", collectives="ordered")
    yield
    uninstall()


@pytest.fixture(autouse=True)
def rank(covered, device):
    kind = torch.device(device).type
    dist.init_process_group({"cpu": "gloo", "cuda": "nccl"}[kind], store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # a head sharded by itself; the embedding, with a softcap
def test_as_a_whole_model(name, device):
    """A second step sees the weights of the first."""
    rows = prompts((9, 30), device=device)
    ids, present = padded(rows, left=True)
    options = {**OPTIONS, "seeds": torch.tensor([5, 6], device=device)}
    found = []
    for sharded in (True, False):
        model = make(name, device, sharded)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps = []
        for _ in range(2):
            optimizer.zero_grad()
            steps.append(scored(model, ids, present))
            optimizer.step()
        assert isinstance(model.get_output_embeddings().weight, DTensor) == sharded
        steps.append(models.generate(model, ids, attention_mask=present, **options))
        batching = transformers.ContinuousBatchingConfig(block_size=16, num_blocks=64, max_batch_tokens=64)
        steps.append(models.generate_batch(model, [row.tolist() for row in rows], batching=batching, **options))
        assert "forward" not in vars(model)
        found.append(steps)
    (*ours, tokens, batched), (*wanted, plain_tokens, plain_batched) = found
    for (results, gradients), (plain_results, plain_gradients) in zip(ours, wanted, strict=True):
        for a, b in zip(results, plain_results, strict=True):
            assert_same_bits(a.detach(), b.detach())
        assert gradients.keys() == plain_gradients.keys()
        for key, gradient in gradients.items():
            assert_same_bits(gradient, plain_gradients[key])
    for a, b in ((tokens, plain_tokens), (batched, plain_batched)):
        assert torch.equal(a.tokens, b.tokens)
        assert_same_bits(a.log_probs, b.log_probs)


def test_a_copy_in_bf16_of_an_fp32_model(device):
    """FSDP2 computes in bf16 with fp32 frequencies: the bits of a roll-out's model, which has bf16 weights."""
    trainer = make("llama", device, True, torch.float32, param_dtype=torch.bfloat16)
    rollout = make("llama", device, False)
    (row,) = prompts((30,), device=device)
    found, wanted = ([t.detach() for t in models.log_prob(m, row[None], row[None])] for m in (trainer, rollout))
    for a, b in zip(found, wanted, strict=True):
        assert_same_bits(a, b)


def test_rounded_results_are_an_error(device):
    model = make("llama", device, True, output_dtype=torch.bfloat16)
    (row,) = prompts((5,), device=device)
    with pytest.raises(ValueError, match="models.log_prob: output_dtype of the model's policy must be None or"):
        models.log_prob(model, row[None], row[None])


def test_an_error_leaves_the_forward(device):
    model, (row,) = make("llama", device, True), prompts((5,), device=device)
    with pytest.raises(TypeError, match="labels must have dtype"):
        models.log_prob(model, row[None], row[None].float())
    assert "forward" not in vars(model)
    model.forward = before = model.forward  # as accelerate leaves one
    models.log_prob(model, input_ids=row[None], labels=row[None])
    assert vars(model)["forward"] == before
