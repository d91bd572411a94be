"""The GPU's tests of training steps, on the CPU: plain torch in place of the kernels."""

import pytest

pytest.importorskip("transformers", minversion="5.0")

from tests.fakes import fake_gpu  # noqa: E402
from tests.models import test_kernel_steps  # noqa: E402
from tests.models.test_kernel_steps import *  # noqa: E402, F403


@pytest.fixture
def path_of_the_kernels(monkeypatch):
    monkeypatch.setattr(test_kernel_steps, "LENGTHS", (5, 12, 3))
    with fake_gpu() as jobs:
        yield jobs
