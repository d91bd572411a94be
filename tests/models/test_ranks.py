"""Models that FSDP2 shards over processes: gloo, and plain torch in place of the kernels."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from tests.models.sharding_cases import start  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


@pytest.mark.exhaustive
def test_ranks_have_the_bits_of_one(tmp_path):
    """Three of them: of two numbers both orders are one sum."""
    start(3, "gloo", str(tmp_path / "store"), on_gpu=False)
