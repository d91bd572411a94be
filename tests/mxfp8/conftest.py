"""The kernels that the collected tests name are precompiled, in parallel: one takes a second."""

import pytest
import torch

from cute_kernels.runtime.targets import arch_of
from tests.mxfp8.cases import Case, kernels_of
from tests.precompiled import precompile


@pytest.fixture(scope="session", autouse=True)
def mxfp8s_precompiled(request):
    if not torch.cuda.is_available():
        return
    cases: list[Case] = []
    for item in request.session.items:
        for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
            cases += [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, Case)]
    precompile(kernels_of(list(dict.fromkeys(cases)), arch_of(0)))
