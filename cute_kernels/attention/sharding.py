"""How DTensor splits attention: sequences are independent, and so are heads of keys with their query heads.

Packed sequences are split by heads alone. Anything else, keys above all, is gathered before. The backward is split as
the forward; where sequences are split, each process has a part of the sum that is the gradient of the sinks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cute_kernels.runtime.operators import FUNCTIONAL_OPERATORS

# The names of results: a gradient is split as what it is the gradient of
RESULTS = {"attention_forward": ("out", "lse"), "attention_backward": ("q", "k", "v", "sinks")}
ROWS = ("q", "k", "v", "out", "dout")  # (..., heads, head size), the first dimension that of sequences if there are 4
OF_ROWS = ("lse", "dlse")  # (..., heads, queries)


@functools.cache
def register() -> None:
    """Register the rules; done by the first eager call with a DTensor, since torch.distributed.tensor loads slowly."""
    from torch.distributed.tensor.experimental import register_sharding

    for name, results in RESULTS.items():
        operator = FUNCTIONAL_OPERATORS[name].registered
        names = [argument.name for argument in operator._schema.arguments]
        register_sharding(operator)(_rule(names, results))


def _rule(names: list[str], results: tuple[str, ...]) -> Callable[..., list[tuple[list, list]]]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    def rule(*arguments: Any) -> list[tuple[list, list]]:
        """(placements of the results, of the arguments): everything replicated, or the batch or the heads split."""
        given = dict(zip(names, arguments, strict=False))
        tensors = {name for name, value in given.items() if hasattr(value, "placements")}
        q, k = given["q"], given["k"]

        def choice(dimensions: dict[str, int], of_sinks: Any) -> tuple[list, list]:
            """``of_sinks``: how their gradient is split."""

            def placement(name: str) -> Any:
                return Shard(dimensions[name]) if name in dimensions else Replicate()

            outputs = [of_sinks if name == "sinks" else placement(name) for name in results]
            return outputs, [placement(name) if name in tensors else None for name in given]

        found = [choice({}, Replicate())]
        if q.ndim == k.ndim == 4:
            batch = dict.fromkeys((*ROWS, *OF_ROWS, "seqused_k"), 0)
            found.append(choice(batch, Partial() if "sinks" in tensors else Replicate()))
        if k.shape[-2] % q.mesh.size() == 0:
            heads = {name: (k if name in ("k", "v") else q).ndim - 2 for name in ROWS}
            heads |= dict.fromkeys(OF_ROWS, q.ndim - 3) | {"sinks": 0}
            found.append(choice(heads, Shard(0) if "sinks" in tensors else Replicate()))
        return found

    return rule
