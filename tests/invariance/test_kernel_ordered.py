"""Sums over GPUs in the order of their ranks, by NCCL."""

import pytest
import torch

from tests.invariance.ordered_cases import start

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_are_added_by_rank(ranks, tmp_path):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    start(ranks, "nccl", str(tmp_path / "store"), on_gpu=True)
