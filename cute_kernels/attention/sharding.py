"""How DTensor splits attention: sequences are independent, and so are heads of keys with their query heads.

Packed sequences are split by heads alone. Anything else, keys above all, is gathered before.
"""

from __future__ import annotations

import functools

from cute_kernels.runtime.operators import FUNCTIONAL_OPERATORS

# The dimension of each tensor that has the sequences of a dense batch; of others there is none
BATCH = {"q": 0, "k": 0, "v": 0, "seqused_k": 0}
ROWS = ("q", "k", "v")  # their last dimension but one is that of heads


@functools.cache
def register() -> None:
    """Register the rule; done by the first eager call with a DTensor, since torch.distributed.tensor loads slowly."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    operator = FUNCTIONAL_OPERATORS["attention_forward"].registered
    names = [argument.name for argument in operator._schema.arguments]

    @register_sharding(operator)
    def rule(*arguments):
        """(placements of out and lse, of the arguments): everything replicated, or the batch or the heads split."""
        given = dict(zip(names, arguments, strict=False))
        tensors = {name for name, value in given.items() if hasattr(value, "placements")}
        q, k = given["q"], given["k"]

        def choice(out: int, lse: int, dimensions: dict[str, int]):
            shards = [Shard(dimensions[name]) if name in dimensions else Replicate() for name in tensors]
            by_name = dict(zip(tensors, shards, strict=True))
            return [Shard(out), Shard(lse)], [by_name.get(name) for name in given]

        found = [([Replicate()] * 2, [Replicate() if name in tensors else None for name in given])]
        if q.ndim == k.ndim == 4:
            found.append(choice(0, 0, BATCH))
        if k.shape[-2] % q.mesh.size() == 0:
            heads = {name: given[name].ndim - 2 for name in ROWS} | {"sinks": 0}
            found.append(choice(q.ndim - 2, q.ndim - 3, heads))
        return found
