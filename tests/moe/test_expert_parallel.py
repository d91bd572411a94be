"""Experts that are spread over two processes: the bits of one, over fake kernels."""

import pytest
import torch

from tests.moe.parallel_cases import start

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def test_two_ranks_have_the_bits_of_one(tmp_path):
    start(2, "gloo", str(tmp_path / "store"), on_gpu=False)
