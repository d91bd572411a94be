"""The kernels that the collected tests name are precompiled, in parallel: one takes a second."""

import pytest
import torch

from cute_kernels import bmm, mm
from jit_cache.prewarm import Job
from tests.fakes import fake_kernels
from tests.gemm.cases import BF16, Batch, Case, here, kernels_of, make_batch, only_kernel, run_batch
from tests.gemm.every_kernel import batches, products
from tests.precompiled import precompile

ANY_STRIDE = (None, False)  # the kernel that each is compared with


@pytest.fixture(scope="session")
def gemms_precompiled(request):
    """For the files that name it: those of grouped products have other kernels, and do not wait for these."""
    if torch.cuda.is_available():
        precompile(gemm_jobs(request.session.items))


def gemm_jobs(items: list[pytest.Item]) -> list[Job]:
    """The kernels of the tests that name ``gemms_precompiled``."""
    params = [item.callspec.params for item in items if has_params(item)]
    values = dict.fromkeys(value for given in params for value in given.values() if isinstance(value, Case | Batch))
    jobs = kernels_of([value for value in values if isinstance(value, Case)], here())
    with fake_kernels(here(), computes=False) as more:
        for name, each in (("kernel", each_product), ("batch_kernel", each_batch)):
            for kernel in dict.fromkeys(given[name] for given in params if name in given):
                for one in {kernel, ANY_STRIDE} if kernel != ANY_STRIDE else ():
                    with only_kernel(*one):
                        each(kernel)
        for case in values:
            if isinstance(case, Batch):
                both_products(case)
    return list(dict.fromkeys(jobs + more))


def has_params(item: pytest.Item) -> bool:
    return hasattr(item, "callspec") and "gemms_precompiled" in item.fixturenames


def each_product(kernel: tuple) -> None:
    """The kernels of test_kernel_invariance.py, for a K of whole blocks of 64 or not."""
    for k in (16, 64):
        a, bias, valid = torch.zeros(64, k, dtype=BF16), torch.zeros(64), torch.ones(1, dtype=torch.int32)
        products(kernel, a, a.clone(), torch.zeros(64, 64), bias, valid)


def each_batch(kernel: tuple) -> None:
    """The kernels of test_kernel_bmm.py, likewise."""
    for k in (16, 64):
        a = torch.zeros(2, 64, k, dtype=BF16)
        batches(kernel, a, a.clone())


def both_products(case):
    """A case of test_bmm.py by ``bmm``, and one entry of it by ``mm``."""
    a, b = make_batch(case, torch.Generator())
    dout = torch.zeros(case.entries, case.m, case.n, dtype=case.out or case.dtype)
    run_batch(bmm, a, b, dout, out_dtype=case.out)
    run_batch(mm, a[0], b[0], dout[0], out_dtype=case.out)
