"""The GPU's tests of generate and log_prob, on the CPU: plain torch in place of the kernels."""

import pytest

pytest.importorskip("transformers", minversion="5.0")

from cute_kernels.models import decoding  # noqa: E402
from tests.fakes import fake_gpu  # noqa: E402
from tests.models.test_kernel_generate import *  # noqa: E402, F403


@pytest.fixture
def path_of_the_kernels():
    with fake_gpu() as jobs:
        yield jobs


@pytest.fixture
def capture(monkeypatch):
    monkeypatch.setattr(decoding, "capture", lambda step: step)
