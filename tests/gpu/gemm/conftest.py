"""The kernels that the collected tests name are compiled beforehand, in parallel: one takes a second."""

import pytest
import torch

from cute_kernels import linear, mm
from cute_kernels.gemm.launch import forced
from jit_cache import prewarm
from tests.gemm_cases import BF16, FP32, LAYOUTS, Case, here, kernels_of, operands, stand_in


@pytest.fixture(scope="session", autouse=True)
def gemm_compiled_beforehand(request):
    if not torch.cuda.is_available():
        return
    values = [v for item in request.session.items if hasattr(item, "callspec") for v in item.callspec.params.values()]
    jobs = kernels_of([value for value in dict.fromkeys(v for v in values if isinstance(v, Case))], here())
    with stand_in(here(), computes=False) as more:
        for config, transposed in {item.callspec.params["kernel"] for item in of_every_kernel(request.session.items)}:
            with forced(config, transposed):
                each_layout()
    prewarm(list(dict.fromkeys(jobs + more)))  # what fails to compile fails again where it is used


def of_every_kernel(items):
    return [item for item in items if hasattr(item, "callspec") and "kernel" in item.callspec.params]


def each_layout():
    """What test_invariance.py asks of every kernel."""
    a, b = torch.zeros(16, 16, dtype=BF16), torch.zeros(16, 16, dtype=BF16)
    for layout in LAYOUTS:
        mm(*operands(a, b, layout), out_dtype=FP32)
    mm(a, b, out=torch.zeros(16, 19)[:, :16])
    weight = b.requires_grad_()
    weight.main_grad = torch.zeros(16, 16)
    for valid in (None, torch.ones(1, dtype=torch.int32)):
        linear(a, weight, num_valid_tokens=valid).backward(a)
    linear(a.detach().requires_grad_(), b.detach(), torch.zeros(16), activation="gelu").backward(a)


@pytest.fixture
def traced_linear():
    return linear


@pytest.fixture
def traced_mm():
    return mm
