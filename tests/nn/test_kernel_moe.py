"""A whole model of experts on a GPU: the checker, generation, training; on the CPU over fakes: test_moe.py."""

from dataclasses import replace

import pytest
import torch

from cute_kernels import check_invariance, nn
from cute_kernels.runtime.launches import observed
from tests.nn.cases import assert_same_bits, gradients, make_config, make_model, make_tokens

pytestmark = pytest.mark.sm90


def make_case(device, streams=None):
    config = replace(make_config(64, layers=2, length=24, streams=streams), num_experts=8, experts_per_token=2)
    return make_model(config, device), make_tokens(config, device=device)


def test_a_model_by_check_invariance(device):
    model, (tokens, _) = make_case(device)
    report = check_invariance(model, tokens)
    assert report, report


def test_sequences_do_not_know_their_batch(device):
    model, (tokens, _) = make_case(device, streams=4)
    with torch.no_grad():
        whole = model(tokens)
        for i in range(len(tokens)):
            assert torch.equal(model(tokens[i : i + 1])[0], whole[i])
    found = model.eval().generate(tokens[:, :5], 4)
    with torch.no_grad():
        logits = model(torch.cat([tokens[:, :5], found.tokens], 1))[:, 4:-1]
    assert torch.equal(logits.argmax(-1), found.tokens)


def test_training_is_reproducible(device):
    model, batch = make_case(device, streams=4)
    assert_same_bits(gradients(model, *batch), gradients(model, *batch))


def test_quantized_experts_do_not_know_their_batch(device):
    """Products of one sequence read mxfp8 weights; of many tokens they are dequantized before."""
    model, (tokens, _) = make_case(device)
    for layer in model.modules():
        if isinstance(layer, nn.MoE):
            layer.quantize_experts()
    with torch.no_grad(), observed() as launches:
        whole = model(tokens.repeat(6, 1))
        before = len(launches)
        for i in range(len(tokens)):
            assert torch.equal(model(tokens[i : i + 1])[0], whole[i])
    names = [[launch.name for launch, *_ in part] for part in (launches[:before], launches[before:])]
    assert [any("grouped_rows_mxfp8" in name for name in part) for part in names] == [False, True]
