"""Bits of tensors."""

import torch
from torch import Tensor


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    """Assert equal bits, of NaN and zeros' signs, too; a failure says where the first difference is, and how many."""
    assert found.shape == wanted.shape and found.dtype is wanted.dtype, (found.shape, found.dtype, wanted.shape)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.itemsize]
    different = found.contiguous().view(integers) != wanted.contiguous().view(integers)
    places = different.nonzero()
    assert not len(places), (
        f"{len(places)} of {found.numel()} elements differ, the first one at {tuple(places[0].tolist())}, by at most "
        f"{(found.double() - wanted.double()).abs().nan_to_num(0).max().item():.3g}"
    )
