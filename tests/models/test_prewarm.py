"""``prewarm --config`` knows each kernel that a training step and models.generate ask for, of each family."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

from transformers.generation.continuous_batching import cache  # noqa: E402

from cute_kernels import batch_invariant, models  # noqa: E402
from cute_kernels.models import decoding  # noqa: E402
from cute_kernels.prewarm import for_config  # noqa: E402
from tests.fakes import fake_gpu  # noqa: E402
from tests.models.cases import FAMILIES, make_prepared, padded, prompts  # noqa: E402
from tests.models.test_kernel_steps import BALANCED  # noqa: E402


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n != "llama")) for n in FAMILIES])
def test_of_a_configuration(name, monkeypatch):
    """Losses of transformers and of log-probabilities, AdamW; steps of decoding from a graph, guesses, both caches."""
    monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: ("cpu", 2**32, 0, 0))  # or none is seen
    monkeypatch.setattr(decoding, "capture", lambda step: step)
    model = make_prepared(name)
    optimizer = torch.optim.AdamW(model.parameters())
    ids, present = padded(prompts((9, 4)), left=True)
    config = model.config.to_dict()
    balanced = {"output_router_logits": True} if name in BALANCED else {}
    with fake_gpu() as jobs, batch_invariant("strict"):
        model(ids, attention_mask=present, labels=ids, use_cache=False, **balanced).loss.backward()
        log_prob, entropy = models.log_prob(model, ids, ids, attention_mask=present)
        (log_prob + entropy).backward(torch.ones_like(log_prob))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        options = {"seeds": torch.arange(2), "attention_mask": present, "max_new_tokens": 4, "eos_token_id": []}
        for other in ({}, {"top_k": 5}, {"graph": True}, {"speculate": 3}, {"cache": "static"}):
            models.generate(model, ids, **options, **other)
        batching = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=6)
        models.generate_batch(
            model, [[5] * 9, [6]], seeds=options["seeds"], max_new_tokens=2, eos_token_id=[], batching=batching
        )
    known = set(for_config(config, "sm_90a"))
    missing = [f"{builder.__name__}{arguments}" for builder, arguments in dict.fromkeys(jobs)]
    missing = [
        text for text, job in zip(missing, dict.fromkeys(jobs), strict=True) if (job[0], tuple(job[1])) not in known
    ]
    assert not missing, "\n".join(missing)
