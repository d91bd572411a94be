"""Tensors that are parts of others, which the modules do not know yet."""

from __future__ import annotations

from torch import Tensor


def expect_whole(module: str, *tensors: Tensor | None) -> None:
    """Raise NotImplementedError for a DTensor; fully_shard's parameters are whole again where a module runs."""
    for t in tensors:
        placements = getattr(t, "placements", None)
        if placements is not None:
            raise NotImplementedError(
                f"{module}: tensor and sequence parallelism are not supported yet, got a tensor of placements "
                f"{placements}; use fully_shard, not parallelize_module"
            )
