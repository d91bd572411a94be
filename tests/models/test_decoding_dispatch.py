"""The GPU's tests of a prompt against decoding, on the CPU: plain torch in place of the kernels."""

import pytest

pytest.importorskip("transformers", minversion="5.0")

from tests.fakes import fake_gpu  # noqa: E402
from tests.models.test_kernel_decoding import *  # noqa: E402, F403


@pytest.fixture
def path_of_the_kernels():
    with fake_gpu() as jobs:
        yield jobs
