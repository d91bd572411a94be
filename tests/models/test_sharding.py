"""Models that FSDP2 shards, on one rank of gloo, plain torch in place of the kernels: as those that it does not."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers.generation.continuous_batching import cache  # noqa: E402

from cute_kernels import batch_invariant, models  # noqa: E402
from tests.fakes import fake_gpu  # noqa: E402
from tests.models.cases import make_prepared, padded, prompts  # noqa: E402
from tests.runtime.bits import assert_same_bits  # noqa: E402

SEEDS = torch.tensor([5, 6])
OPTIONS = {"seeds": SEEDS, "max_new_tokens": 3, "eos_token_id": []}


@pytest.fixture(autouse=True)
def inside(monkeypatch):
    monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: ("cpu", 2**32, 0, 0))  # or none is seen
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with fake_gpu(), batch_invariant("strict"):
        yield
    dist.destroy_process_group()


def make(name, sharded):
    model = make_prepared(name).train()
    if sharded:
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def scored(model, ids, present):
    """Log-probabilities, entropies and each parameter's gradient."""
    results = models.log_prob(model, ids, ids, attention_mask=present)
    (results[0] + 0.1 * results[1]).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return results, {name: g.to_local() if isinstance(g, DTensor) else g for name, g in gradients.items()}


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # the second's head is the embedding, with a softcap
def test_as_a_whole_model(name):
    """A second step sees the weights of the first."""
    rows = prompts((9, 30))
    ids, present = padded(rows, left=True)
    found = []
    for sharded in (True, False):
        model = make(name, sharded)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps = []
        for _ in range(2):
            optimizer.zero_grad()
            steps.append(scored(model, ids, present))
            optimizer.step()
        assert isinstance(model.get_output_embeddings().weight, DTensor) == sharded
        steps.append(models.generate(model, ids, attention_mask=present, **OPTIONS))
        batching = transformers.ContinuousBatchingConfig(block_size=16, num_blocks=64, max_batch_tokens=64)
        steps.append(models.generate_batch(model, [row.tolist() for row in rows], batching=batching, **OPTIONS))
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


def test_an_error_leaves_the_forward():
    model, (row,) = make("llama", True), prompts((5,))
    with pytest.raises(TypeError, match="labels must have dtype"):
        models.log_prob(model, row[None], row[None].float())
    assert "forward" not in vars(model)
    model.forward = before = model.forward  # as accelerate leaves one
    models.log_prob(model, input_ids=row[None], labels=row[None])
    assert vars(model)["forward"] == before
