"""``prewarm --config`` knows each kernel that models.log_prob, its backward and models.generate ask for."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

from transformers.generation.continuous_batching import cache  # noqa: E402

from cute_kernels import batch_invariant, models  # noqa: E402
from cute_kernels.prewarm import for_config  # noqa: E402
from tests.fakes import fake_gpu  # noqa: E402
from tests.models.cases import make_prepared, padded, prompts  # noqa: E402


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(
            pytest.param(n, marks=pytest.mark.exhaustive)
            for n in ("gemma2", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe")
        ),
    ],
)
def test_of_a_configuration(name, monkeypatch):
    monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: ("cpu", 2**32, 0, 0))  # or none is seen
    model = make_prepared(name)
    ids, present = padded(prompts((9, 4)), left=True)
    with fake_gpu() as jobs, batch_invariant("strict"):
        log_prob, _ = models.log_prob(model, ids, ids, attention_mask=present)
        log_prob.backward(torch.ones_like(log_prob))
        seeds = torch.arange(2)
        for top_k in (None, 5):
            models.generate(
                model, ids, seeds=seeds, attention_mask=present, max_new_tokens=2, top_k=top_k, eos_token_id=[]
            )
        if name != "deepseek_v3":
            batching = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=6)
            models.generate_batch(
                model, [[5] * 9, [6]], seeds=seeds, max_new_tokens=2, eos_token_id=[], batching=batching
            )
    known = set(for_config(model.config.to_dict(), "sm_90a"))
    missing = [f"{builder.__name__}{arguments}" for builder, arguments in dict.fromkeys(jobs)]
    missing = [
        text for text, job in zip(missing, dict.fromkeys(jobs), strict=True) if (job[0], tuple(job[1])) not in known
    ]
    assert not missing, "\n".join(missing)
