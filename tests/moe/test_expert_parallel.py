"""Experts that are spread over processes: the bits of one, over fake kernels."""

import pytest
import torch

from tests.moe.parallel_cases import start

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 2, pytest.param(4, marks=pytest.mark.exhaustive)]
)
def test_ranks_have_the_bits_of_one(ranks, tmp_path):
    start(ranks, "gloo", str(tmp_path / "store"), on_gpu=False)
