"""The precompiled kernels are all that a whole model of more than 256 tokens needs."""

from dataclasses import asdict, replace

import pytest

from cute_kernels.attention import prewarm as attention
from cute_kernels.gemm import prewarm as gemm
from cute_kernels.log_prob import launch
from cute_kernels.log_prob import prewarm as log_prob
from cute_kernels.mhc import prewarm as mhc
from cute_kernels.norm import prewarm as norm
from cute_kernels.prewarm import for_config
from tests.nn.cases import BF16, FP32, kernels_of, make_config, with_connections

CHANNELS = 768


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_tables_have_a_whole_model(arch, monkeypatch):
    """With one stream and with four, with recompute and without, into main_grads and not; the vocabulary in parts."""
    for module, name in (
        (norm, "WIDTHS"),
        (norm, "MODEL_WIDTHS"),
        (mhc, "CHANNELS"),
        (mhc, "MODEL_CHANNELS"),
    ):
        monkeypatch.setattr(module, name, (CHANNELS,))
    monkeypatch.setattr(launch, "GRADIENT_ELEMENTS", 2**20)
    table = {job for family in (attention, gemm, log_prob, mhc, norm) for job in family.specializations(arch)}
    four = make_config(CHANNELS, layers=2, length=300, heads=6, vocab=4096)
    one = make_config(CHANNELS, layers=2, length=300, heads=6, vocab=4096, streams=None)
    configs = [one, four, *(with_connections(four, recompute=True, recompute_layers=layers) for layers in (1, 2))]
    for main_grad in (False, True):
        missing = set(kernels_of(configs, arch, batch=1, main_grad=main_grad)) - table
        assert not missing, [(builder.__name__, arguments) for builder, arguments in missing]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_config_has_a_model_of_experts(dtype):
    """From few rows of an expert to many, with a main_grad and without."""
    sizes = {"num_experts": 8, "experts_per_token": 2}
    config = replace(make_config(64, layers=1, length=300, streams=None, vocab=128), **sizes)
    table = set(for_config({**asdict(config), "dtype": dtype}, "sm_90a"))
    names = set()
    for length in (16, 60, 120, 300):
        configs = [replace(config, max_sequence_length=length)]
        for main_grad in (False, True):
            jobs = set(kernels_of(configs, "sm_90a", batch=1, dtypes=(dtype,), main_grad=main_grad))
            names |= {builder.__name__ for builder, _ in jobs}
            missing = jobs - table
            assert not missing, [(builder.__name__, arguments) for builder, arguments in missing]
    assert {"grouped", "route", "route_backward", "plan", "gather", "combine", "gate", "gate_backward"} <= names


def test_the_widths_of_whole_models():
    assert mhc.MODEL_CHANNELS == norm.MODEL_WIDTHS
    assert set(mhc.MODEL_CHANNELS) <= set(mhc.CHANNELS) & set(norm.WIDTHS)
