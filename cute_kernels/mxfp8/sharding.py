"""How DTensor splits the quantizers: experts are independent, and so are a matrix's rows and columns of blocks.

The scales of a shard are a shard of the scales, except in the blocked layout of a matrix, whose atoms of 128 rows a
shard may cut: such calls, those whose shards would not be whole blocks, and those of experts split along N or K get
their input gathered.
"""

from __future__ import annotations

import functools

from cute_kernels.mxfp8.config import BLOCK
from cute_kernels.runtime.operators import FUNCTIONAL_OPERATORS


@functools.cache
def register() -> None:
    """Register the rules; done by the first eager call with a DTensor, since torch.distributed.tensor loads slowly."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def rules(tensors: tuple[int, int], values: int, shards: list):
        """(placements of the outputs, of the arguments): everything replicated, or one of ``shards``."""
        outputs, inputs = tensors
        every = [([Replicate()] * outputs, [Replicate()] * inputs), *shards]
        return [(found, [*given, *[None] * values]) for found, given in every]

    def whole_blocks(x) -> list[int]:
        """The dimensions of a matrix whose shards are whole blocks."""
        return [dim for dim in (0, 1) if x.shape[dim] % (BLOCK * x.mesh.size()) == 0]

    def of_matrix(dim: int, transposed: bool) -> list:
        """Placements of the elements and of their plain scales, whose dimensions are those of the memory's rows."""
        return [Shard(dim), Shard(1 - dim if transposed else dim)]

    def quantize_rule(outputs: int):
        def rule(x, dtype, along_k, along_n, square, mode, scale_layout):
            shards = []
            if x.ndim == 3:
                shards.append(([Shard(0)] * outputs, [Shard(0)]))
            elif scale_layout == "plain" and not square:
                for dim in whole_blocks(x):
                    found = (of_matrix(dim, False) if along_k else []) + (of_matrix(dim, True) if along_n else [])
                    shards.append((found, [Shard(dim)]))
            return rules((outputs, 1), 6, shards)

        return rule

    def dequantize_rule(q, scale, dtype, transposed):
        shards = []
        if q.ndim == 3:
            shards.append(([Shard(0)], [Shard(0), Shard(0)]))
        elif scale.ndim == 2:
            shards += [([Shard(dim)], of_matrix(dim, transposed)) for dim in whole_blocks(q)]
        return rules((1, 2), 2, shards)

    names = {2: "mxfp8_quantize", 3: "mxfp8_quantize_squares", 4: "mxfp8_quantize_dual"}
    for outputs, name in names.items():
        register_sharding(FUNCTIONAL_OPERATORS[name].registered)(quantize_rule(outputs))
    register_sharding(FUNCTIONAL_OPERATORS["mxfp8_dequantize"].registered)(dequantize_rule)
