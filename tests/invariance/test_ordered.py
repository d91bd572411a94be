"""Sums over processes in the order of their ranks, by gloo."""

import pytest
import torch

from tests.invariance.ordered_cases import start

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_sums_are_added_by_rank(ranks, tmp_path):
    start(ranks, "gloo", str(tmp_path / "store"), on_gpu=False)
