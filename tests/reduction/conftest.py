"""The kernels that the collected tests name are precompiled, in parallel."""

import pytest
import torch

from cute_kernels import reduction
from tests.fakes import fake_kernels
from tests.gemm.cases import here
from tests.precompiled import precompile
from tests.reduction.cases import BF16, FP32, SoftmaxCase, kernels_of
from tests.reduction.test_kernel import SUMS


@pytest.fixture(scope="session", autouse=True)
def reductions_precompiled(request):
    if not torch.cuda.is_available():
        return
    values = [v for item in request.session.items if hasattr(item, "callspec") for v in item.callspec.params.values()]
    values += [v for value in values if isinstance(value, list) for v in value]
    jobs = kernels_of([value for value in dict.fromkeys(v for v in values if isinstance(v, SoftmaxCase))], here())
    with fake_kernels(here()) as more:
        for shape, dim in SUMS:
            for dtype in (BF16, FP32):
                for out in (BF16, FP32):
                    reduction.sum(torch.zeros(shape, dtype=dtype), dim, out_dtype=out)
    precompile(jobs + more)
