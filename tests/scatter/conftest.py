"""The kernels that the collected tests need are precompiled, in parallel."""

import pytest
import torch

from cute_kernels import scatter
from tests.fakes import fake_kernels
from tests.gemm.cases import here
from tests.precompiled import precompile
from tests.scatter.cases import Case, make_inputs


@pytest.fixture(scope="session", autouse=True)
def sums_precompiled(request):
    if not torch.cuda.is_available():
        return
    values = [v for item in request.session.items if hasattr(item, "callspec") for v in item.callspec.params.values()]
    with fake_kernels(here(), computes=False) as jobs:
        for case in dict.fromkeys(v for v in values if isinstance(v, Case)):
            few = Case(2, 3, case.columns, "uniform", case.dtype, case.out)
            dy, ids = make_inputs(few, torch.Generator())
            scatter.embedding_backward(dy, ids, few.rows, out_dtype=few.out)
    precompile(jobs)
