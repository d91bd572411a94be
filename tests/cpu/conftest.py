"""What the tests of tests/gpu take from fixtures, where they run on the CPU; and seeded numbers for all."""

import pytest

from tests.norm_cases import seeded_generator


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture
def compile_backend():
    return "aot_eager"


@pytest.fixture
def generator(request):
    return seeded_generator(request.node.nodeid, "cpu")
