"""The plugin on a GPU, under ``install`` as in vLLM, with its stubs: attention, experts, norms, log-probabilities."""

import pytest
import torch

from cute_kernels import is_installed, reduction, rms_norm
from cute_kernels.integrations import vllm as plugin
from tests.integrations.vllm_cases import BF16, CASES, MIXTURES, check_experts, check_steps

pytestmark = pytest.mark.sm90


@pytest.mark.parametrize("case", CASES)
def test_a_row_has_the_bits_of_the_whole_sequence(vllm, generator, case):
    plugin.register()
    with torch.device(generator.device), torch.inference_mode():
        check_steps(case, generator)
    assert is_installed()


@pytest.mark.parametrize("case", MIXTURES)
def test_experts(vllm, generator, case):
    plugin.register()
    with torch.device(generator.device), torch.inference_mode():
        check_experts(case, generator)


def test_norms_and_log_probs(vllm, generator):
    """In the batch of all rows, and each alone."""
    plugin.register()
    with torch.device(generator.device), torch.inference_mode():
        x, r = torch.randn(2, 5, 64, generator=generator).to(BF16)
        layer = vllm.model_executor.layers.layernorm.RMSNorm(64, 1e-5, dtype=BF16)
        y, h = layer(x, r)
        alone = [layer(x[i : i + 1], r[i : i + 1]) for i in range(5)]
        assert torch.equal(y, torch.cat([y for y, _ in alone])) and torch.equal(h, x + r)
        assert torch.equal(y, rms_norm(x, layer.weight, residual=r, eps=1e-5))
        logits = torch.randn(5, 1000, generator=generator).to(BF16)
        ids = torch.arange(10).view(5, 2)
        compute = vllm.v1.worker.gpu.sample.logprob.compute_token_logprobs
        found = compute(logits, ids)
        assert torch.equal(found, reduction.log_softmax(logits.float()).gather(-1, ids))
        assert torch.equal(found, torch.cat([compute(logits[i : i + 1], ids[i : i + 1]) for i in range(5)]))
        wanted = logits.double().cpu().log_softmax(-1).gather(-1, ids.cpu())
        torch.testing.assert_close(found.double().cpu(), wanted, atol=1e-5, rtol=1e-5)
