"""How DTensor splits the quantizers: experts are independent, and so are a matrix's rows (columns) of blocks.

The scales of a shard are a shard of the scales, except in the blocked layout of a matrix, whose atoms of 128 rows a
shard may cut: such calls, and those whose shards would not be whole blocks, get their input gathered.
"""

from __future__ import annotations

import functools

from cute_kernels.mxfp8.config import BLOCK


@functools.cache
def register() -> None:
    """Register the rules; done by the first eager call with a DTensor, since torch.distributed.tensor loads slowly."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    from cute_kernels.mxfp8.launch import dequantize_op, quantize_ops

    def rules(tensors: tuple[int, int], values: int, shards: list):
        """(placements of the outputs, of the arguments): everything replicated, or one of ``shards``."""
        outputs, inputs = tensors
        every = [([Replicate()] * outputs, [Replicate()] * inputs), *shards]
        return [(found, [*given, *[None] * values]) for found, given in every]

    def whole_blocks(x, dim: int) -> bool:
        return x.shape[dim] % (BLOCK * x.mesh.size()) == 0

    def quantize_rule(outputs: int):
        def rule(x, dtype, along_k, along_n, square, mode, scale_layout):
            shards = []
            if x.ndim == 3:
                shards.append(([Shard(0)] * outputs, [Shard(0)]))
            elif scale_layout == "plain" and outputs == 2:
                dim = 0 if along_k else 1
                if whole_blocks(x, dim):
                    shards.append(([Shard(dim), Shard(0)], [Shard(dim)]))
            return rules((outputs, 1), 6, shards)

        return rule

    def dequantize_rule(q, scale, dtype):
        shards = []
        if q.ndim == 3:
            shards.append(([Shard(0)], [Shard(0), Shard(0)]))
        elif scale.ndim == 2:
            stride = q.tensor_meta.stride
            dim = 1 if stride[-1] != 1 and stride[-2] == 1 else 0
            if whole_blocks(q, dim):
                shards.append(([Shard(dim)], [Shard(dim), Shard(0)]))
        return rules((1, 2), 1, shards)

    for outputs, operator in quantize_ops.items():
        register_sharding(operator)(quantize_rule(outputs))
    register_sharding(dequantize_op)(dequantize_rule)
