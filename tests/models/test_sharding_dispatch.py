"""The GPU's tests of models that FSDP2 shards, on the CPU: gloo, and plain torch in place of the kernels."""

import pytest

pytest.importorskip("transformers", minversion="5.17")

from transformers.generation.continuous_batching import cache  # noqa: E402

from cute_kernels import batch_invariant  # noqa: E402
from tests.fakes import fake_gpu  # noqa: E402
from tests.models.test_kernel_sharding import *  # noqa: E402, F403


@pytest.fixture
def covered(monkeypatch):
    monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: ("cpu", 2**32, 0, 0))  # or none is seen
    with fake_gpu(), batch_invariant("strict"):
        yield
