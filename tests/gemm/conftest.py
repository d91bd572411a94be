"""The kernels that the collected tests name are precompiled, in parallel: one takes a second."""

import pytest
import torch

from cute_kernels import bmm, linear, mm
from tests.fakes import fake_kernels
from tests.gemm.cases import (
    BF16,
    FP32,
    LAYOUTS,
    Batch,
    Case,
    here,
    kernels_of,
    laid_out,
    make_batch,
    only_kernel,
    operands,
    run_batch,
)
from tests.precompiled import precompile


@pytest.fixture(scope="session", autouse=True)
def gemms_precompiled(request):
    if not torch.cuda.is_available():
        return
    values = [v for item in request.session.items if hasattr(item, "callspec") for v in item.callspec.params.values()]
    jobs = kernels_of([value for value in dict.fromkeys(v for v in values if isinstance(v, Case))], here())
    with fake_kernels(here(), computes=False) as more:
        for config, transposed in of_every_kernel(request.session.items, "kernel"):
            with only_kernel(config, transposed):
                each_layout(16)
                each_layout(64)
        for config, transposed in of_every_kernel(request.session.items, "batch_kernel"):
            with only_kernel(config, transposed):
                each_batch(16)
                each_batch(64)
        for case in dict.fromkeys(value for value in values if isinstance(value, Batch)):
            both_products(case)
    precompile(jobs + more)


def of_every_kernel(items, name):
    return {item.callspec.params[name] for item in items if hasattr(item, "callspec") and name in item.callspec.params}


def each_layout(size):
    """The kernels of test_kernel_invariance.py, for a K of whole blocks of 64 or not."""
    a, b = torch.zeros(size, size, dtype=BF16), torch.zeros(size, size, dtype=BF16)
    for layout in LAYOUTS:
        mm(*operands(a, b, layout), out_dtype=FP32)
    mm(a, b, out=torch.zeros(size, size + 3)[:, :size])
    weight = b.requires_grad_()
    weight.main_grad = torch.zeros(size, size)
    for valid in (None, torch.ones(1, dtype=torch.int32)):
        linear(a, weight, num_valid_tokens=valid).backward(a)
    bias = torch.zeros(size, requires_grad=True)
    bias.main_grad = torch.zeros(size)
    by_columns = laid_out(a, False)
    linear(by_columns, weight, bias, num_valid_tokens=torch.ones(1, dtype=torch.int32)).backward(by_columns)
    linear(a.detach().requires_grad_(), b.detach(), torch.zeros(size), activation="gelu").backward(a)


def each_batch(size):
    """The kernels of test_kernel_bmm.py, likewise."""
    a, b = torch.zeros(size, size, dtype=BF16), torch.zeros(size, size, dtype=BF16)
    for layout in LAYOUTS:
        for out in (FP32, BF16):
            bmm(*(t[None] for t in operands(a, b, layout)), out_dtype=out)
    bmm(a[None], torch.zeros(1, size + 1, size, dtype=BF16).mT, out_dtype=FP32)


def both_products(case):
    """A case of test_bmm.py by ``bmm``, and one entry of it by ``mm``."""
    a, b = make_batch(case, torch.Generator())
    dout = torch.zeros(case.entries, case.m, case.n, dtype=case.out or case.dtype)
    run_batch(bmm, a, b, dout, out_dtype=case.out)
    run_batch(mm, a[0], b[0], dout[0], out_dtype=case.out)
