"""``prewarm --config`` knows the kernels of experts of models of transformers, from few rows of an expert to many."""

import pytest
import torch

from cute_kernels import grouped_mm, moe, nn
from cute_kernels.gemm.config_grouped import MANY_ROWS, ONE_TILE, SOME
from cute_kernels.prewarm import for_config
from tests.fakes import fake_kernels
from tests.moe.cases import BF16, FP32, randn, run_layer
from tests.moe.test_kernel_moe import ACTIVATIONS, make_other

TOKENS = (9, 60, 400)


def assert_known(jobs, arch="sm_90a", **config):
    """They are precompiled for a model of such experts, whose tokens have 64 channels."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 72, "num_local_experts": 8, "num_experts_per_tok": 2}
    missing = set(jobs) - set(for_config({**sizes, "torch_dtype": "bfloat16", **config}, arch))
    assert jobs and not missing, [(builder.__name__, arguments) for builder, arguments in missing]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_gpt_oss(arch, generator):
    """With a main_grad and without."""
    options = ACTIVATIONS[1]
    with fake_kernels(arch, computes=False) as jobs:
        for tokens in TOKENS:
            layer = make_other(options, generator, tokens, hidden=64)
            run_layer(layer, 2, **options)
            gate_up, down, *biases = (
                t.clone().requires_grad_() for t in (layer.gate_up, layer.down, layer.gate_up_bias, layer.down_bias)
            )
            for t in (gate_up, down, *biases):
                t.main_grad = torch.zeros_like(t, dtype=FP32)
            given = dict(zip(("gate_up_bias", "down_bias"), biases, strict=True))
            routing = moe.route(layer.logits.requires_grad_(), 2)
            moe.experts(layer.x, routing, gate_up, down, **given, **options).backward(layer.dy)
    assert_known(jobs, arch, model_type="gpt_oss")


@pytest.mark.parametrize("hidden", [64, 2880, 4096])
def test_rows_of_experts(hidden):
    """Of each mean at which another kernel may be chosen, forward and backward."""
    rows = [8 * mean for mean in (1, 24, 25, SOME, SOME + 1, ONE_TILE, ONE_TILE + 1, 512)]
    offs, weight = torch.zeros(8, dtype=torch.int32), torch.zeros(8, 144, hidden, dtype=BF16)
    with fake_kernels(computes=False) as jobs:
        for count in rows:
            grouped_mm(torch.zeros(count, hidden, dtype=BF16), weight.mT, offs)
            grouped_mm(torch.zeros(count, 144, dtype=BF16), weight, offs)
    assert_known(jobs, hidden_size=hidden)


def test_rows_of_a_rank_s_experts():
    """Of 16 of 128 experts of gpt-oss' sizes: tiles of 128 columns, which those of all of them never have."""
    offs, weight = torch.zeros(16, dtype=torch.int32), torch.empty(16, 2880, 5760, dtype=BF16)
    with fake_kernels(computes=False) as jobs:
        grouped_mm(torch.empty(16 * ONE_TILE, 2880, dtype=BF16), weight, offs)
    sizes = {"hidden_size": 2880, "moe_intermediate_size": 2880, "num_local_experts": 128}
    assert_known(jobs, model_type="gpt_oss", **sizes)


def test_many_rows():
    """Sums into main_grad, of tiles that overhang, have another kernel then."""
    offs, into = torch.zeros(8, dtype=torch.int32), torch.zeros(8, 144, 2048)
    with fake_kernels(computes=False) as jobs:
        for rows in (8 * MANY_ROWS - 8, 8 * MANY_ROWS):
            dz, x = torch.zeros(rows, 144, dtype=BF16), torch.zeros(rows, 2048, dtype=BF16)
            grouped_mm(dz.t(), x, offs, accumulate_into=into)
    assert len(set(jobs)) == 2
    assert_known(jobs, hidden_size=2048)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("hidden", [64, 96, 128])
def test_experts_in_mxfp8(hidden, dtype, generator):
    """From their quantizer on, of weights in bf16 or fp32; from few rows to so many that weights are dequantized."""
    with fake_kernels(computes=False) as jobs:
        model = nn.MoE(hidden, 96, 8, 2, dtype=dtype).quantize_experts()
        with torch.no_grad():
            for tokens in (1, 9, 20, 60, 400, 3000):
                model(randn(tokens, hidden, generator=generator, dtype=BF16))
    assert {"grouped_mxfp8", "mxfp8_quantize", "mxfp8_dequantize"} <= {builder.__name__ for builder, _ in jobs}
    name = {BF16: "bfloat16", FP32: "float32"}[dtype]
    assert_known(jobs, hidden_size=hidden, moe_intermediate_size=96, torch_dtype=name)


def test_experts_in_mxfp8_on_sm100(generator):
    """They are dequantized for any number of rows."""
    with fake_kernels("sm_100a", computes=False) as jobs:
        model = nn.MoE(64, 96, 8, 2, dtype=BF16).quantize_experts()
        with torch.no_grad():
            for tokens in (1, 9, 60, 400):
                model(randn(tokens, 64, generator=generator, dtype=BF16))
    assert "mxfp8_dequantize" in {builder.__name__ for builder, _ in jobs}
    assert_known(jobs, "sm_100a", moe_intermediate_size=96)


def test_deepseek(generator):
    """A router of sigmoids and groups, with a loss, and its replay."""
    options = {"score": "sigmoid", "groups": (4, 2), "eps": 1e-20, "scale": 2.5, "selection_bias": True}
    with fake_kernels(computes=False) as jobs:
        model = nn.MoE(64, 72, 8, 2, dtype=BF16, balance=0.1, z_loss=0.1, **options).train()
        for tokens in TOKENS:
            x = randn(tokens, 64, generator=generator, dtype=BF16).requires_grad_()
            model(x).sum().backward()
            model(x, model.last_routing.indices)
    assert_known(jobs, model_type="deepseek_v3", n_group=4, topk_group=2, n_shared_experts=1)
