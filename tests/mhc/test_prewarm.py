"""The shipped table of the hyper-connections is what its docstring says: no kernel less, none that nobody asks for."""

import pytest
import torch

from cute_kernels import mhc
from cute_kernels.mhc import prewarm
from tests.fakes import fake_kernels
from tests.mhc.cases import SIZES, Case, differentiate, make_inputs, make_upstream, seeded_generator
from tests.mhc.conftest import kernels_of
from tests.nn import cases as nn_cases

ARCHS = ["sm_90a", "sm_100a"]


def of_calls(case: Case, arch: str, *ops: str) -> set:
    """The kernels that training and inference with the ops need."""
    return set(kernels_of([(op, case, "tf32", True) for op in ops], arch))


def into_main_grads(case: Case, arch: str) -> set:
    generator = seeded_generator(str(case), "cpu")
    tensors = make_inputs(case, generator)
    for name in ("phi", "alpha", "beta", "fn", "base", "scale"):
        tensors[name].main_grad = torch.zeros_like(tensors[name])
    with fake_kernels(arch, computes=False) as jobs:
        for op in ("pre", "hyper_connection", "head"):
            differentiate(mhc, op, case, tensors, make_upstream(op, case, generator))
    return set(jobs)


def of_a_model(channels: int, arch: str) -> set:
    """Without recompute, and with blocks of it, into main_grads, too; the hyper-connections' kernels alone."""
    options = {"layers": 2, "heads": channels // 128, "recompute_layers": 1}
    configs = [nn_cases.make_config(channels, recompute=True, **options)]
    configs.append(nn_cases.with_connections(configs[0], recompute=False, recompute_layers=None))
    found = [job for main_grad in (False, True) for job in nn_cases.kernels_of(configs, arch, main_grad=main_grad)]
    return {job for job in found if ".mhc." in job[0].kernel}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("channels", [768, 1280])
def test_the_table_of_a_width(channels, arch, monkeypatch):
    monkeypatch.setattr(prewarm, "CHANNELS", (channels,))
    monkeypatch.setattr(prewarm, "MODEL_CHANNELS", (channels,))
    table = list(prewarm.specializations(arch))
    assert len(set(table)) == len(table)
    case = Case(4, channels, (2,))
    layers, ends = ("pre", "expand_combine", "hyper_connection"), ("expand", "contract", "head")
    asked = of_calls(case, arch, *layers, *ends) | into_main_grads(case, arch)
    assert set(table) == asked | of_a_model(channels, arch)


def test_the_widths():
    assert set(prewarm.CHANNELS) == {channels for _, channels in SIZES}
    assert set(prewarm.MODEL_CHANNELS) <= set(prewarm.CHANNELS)
