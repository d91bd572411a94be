"""Models of the transformers package with experts inside of ``batch_invariant("strict")``: nothing is uncovered."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from cute_kernels import batch_invariant  # noqa: E402
from tests.moe.cases import BF16  # noqa: E402
from tests.moe.transformers_cases import CONFIGS, make_model, tokens  # noqa: E402
from tests.runtime.bits import assert_same_bits  # noqa: E402

pytestmark = pytest.mark.sm90


@pytest.fixture
def path_of_the_kernels():
    """On the CPU fake kernels: before a block begins."""


@pytest.fixture(autouse=True)
def strict(path_of_the_kernels):
    with batch_invariant("strict"):
        yield


@pytest.mark.parametrize("name", CONFIGS)
def test_a_sequence_does_not_know_its_batch(name, device):
    """Logits, and gradients of the embedded tokens; gradients of the parameters are the same once more."""
    model, ids = make_model(name, "cute_kernels", device, BF16).train(), tokens(3, 17, device=device)

    def run(ids):
        model.zero_grad()
        x = model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = model(inputs_embeds=x, use_cache=False).logits
        logits.backward(torch.linspace(-1, 1, logits.shape[-1], device=device).to(BF16).expand_as(logits))
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        return logits.detach(), x.grad, gradients

    logits, dx, gradients = run(ids)
    for i in range(len(ids)):
        alone, of_x, _ = run(ids[i : i + 1])
        assert_same_bits(alone[0], logits[i])
        assert_same_bits(of_x[0], dx[i])
    again = run(ids)[2]
    assert any("experts" in key for key in gradients)
    for key, gradient in gradients.items():
        assert_same_bits(again[key], gradient)
