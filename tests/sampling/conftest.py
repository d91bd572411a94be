"""The kernels that the collected tests name are precompiled, in parallel."""

import pytest
import torch

from cute_kernels import sample
from tests.fakes import fake_kernels
from tests.gemm.cases import here
from tests.precompiled import precompile
from tests.sampling.cases import Case, make_inputs


@pytest.fixture(scope="session", autouse=True)
def sampling_precompiled(request):
    if not torch.cuda.is_available():
        return
    values = [v for item in request.session.items if hasattr(item, "callspec") for v in item.callspec.params.values()]
    cases = [v for v in values if isinstance(v, Case)]
    cases += [Case(1, n, d) for n, d in ((151936, torch.bfloat16), (128256, torch.float32), (50257, torch.float16))]
    with fake_kernels(here(), computes=False) as jobs:
        for case in {(c.columns, c.dtype): c for c in cases}.values():
            inputs = make_inputs(Case(2, case.columns, case.dtype), torch.Generator())
            for options in ({}, {"top_k": 2}):
                sample(**inputs, **options)
    precompile(jobs)
