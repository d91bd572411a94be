"""The GPU's tests of generate_batch, on the CPU: plain torch in place of the kernels."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from transformers.generation.continuous_batching import cache  # noqa: E402

from tests.fakes import fake_gpu  # noqa: E402
from tests.models.test_kernel_batching import *  # noqa: E402, F403


@pytest.fixture
def path_of_the_kernels():
    with fake_gpu() as jobs:
        yield jobs


@pytest.fixture
def memory(monkeypatch):
    """Without psutil transformers sees no memory on a CPU."""
    monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: ("cpu", 2**32, 0, 0))


@pytest.fixture
def pinned(monkeypatch):
    """Without a GPU torch pins none."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
