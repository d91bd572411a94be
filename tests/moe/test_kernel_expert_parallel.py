"""Experts that are spread over GPUs: the bits of one."""

import pytest
import torch

from tests.moe.parallel_cases import start

pytestmark = [pytest.mark.sm90, pytest.mark.slow]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_the_bits_of_one(ranks, tmp_path):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    start(ranks, "nccl", str(tmp_path / "store"), on_gpu=True)
