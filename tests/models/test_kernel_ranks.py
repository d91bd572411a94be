"""Models that FSDP2 shards over GPUs: log-probabilities, gradients and roll-outs of those that it does not."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from tests.models.sharding_cases import start  # noqa: E402

pytestmark = [pytest.mark.sm90, pytest.mark.slow]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_the_bits_of_one(ranks, tmp_path):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    start(ranks, "nccl", str(tmp_path / "store"), on_gpu=True)
