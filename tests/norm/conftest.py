"""The kernels that the collected tests name are compiled before the first of them, in parallel."""

import pytest

from cute_kernels.runtime.targets import arch_of
from tests.conftest import missing_gpu
from tests.norm.cases import Case, kernels_of, public_norm
from tests.precompiled import precompile


@pytest.fixture(scope="session", autouse=True)
def norms_precompiled(request):
    """One after the other they take a second or two each."""
    if missing_gpu():
        return
    cases: list[Case] = []
    for item in request.session.items:
        for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
            values = value if isinstance(value, list) else [value]
            cases += [value for value in values if isinstance(value, Case)]
    precompile(kernels_of(list(dict.fromkeys(cases)), arch_of(0)))


@pytest.fixture
def norm():
    return public_norm
