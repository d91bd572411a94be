"""How DTensor splits attention: sequences are independent, and so are heads of keys with their query heads.

Packed sequences are split by heads alone. Anything else, keys above all, is gathered before. The backward is split as
the forward; where sequences are split, each process has a part of the sum that is the gradient of the sinks.

A cache is written to, so it stays as it is split, and all else follows: ``attend_over_parts``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_kernels.attention.checks_cache import OP, Cache, check_cache, check_cache_out, check_options
from cute_kernels.runtime.checks import fail
from cute_kernels.runtime.operators import FUNCTIONAL_OPERATORS
from cute_kernels.runtime.real import as_float

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

# The names of results: a gradient is split as what it is the gradient of
RESULTS = {"attention_forward": ("out", "lse"), "attention_backward": ("q", "k", "v", "sinks")}
ROWS = ("q", "k", "v", "out", "dout")  # (..., heads, head size), the first dimension that of sequences if there are 4
OF_ROWS = ("lse", "dlse")  # (..., heads, queries)
CACHE_TENSORS = ("k_cache", "v_cache", "cache_seqlens", "page_table", "k", "v", "cu_seqlens_q")  # in Cache's order


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


def is_dtensor(t: object) -> bool:
    """Without an import of torch.distributed.tensor, which loads slowly."""
    return type(t) is not Tensor and type(t).__module__.startswith("torch.distributed.tensor")


def attend_over_parts(function: Callable[..., Any], tensors: dict[str, Any], options: dict[str, Any]) -> Any:
    """``function``, which is ``attention_with_kv_cache``, of DTensors: each process attends over its part of the cache.

    The cache's heads or, where it is contiguous, its sequences are split, or nothing is. The other tensors are sent to
    where they are needed; the results are split as the cache is.

    Args:
        tensors: arguments of that function that are tensors or None, by name, all of them.
        options: the others.

    Raises:
        TypeError, ValueError: a bad argument, a tensor that is no DTensor, a cache that is split otherwise.
    """
    from torch.distributed.tensor import DTensor

    q, k_cache, v_cache, out = (tensors[name] for name in ("q", "k_cache", "v_cache", "out"))
    mesh = (k_cache if is_dtensor(k_cache) else q).device_mesh
    given = {name: t for name, t in tensors.items() if t is not None}
    for name, t in given.items():
        if not isinstance(t, DTensor):
            fail(OP, name, "be a DTensor, since others are", type(t).__name__, TypeError)
        if t.device_mesh != mesh:
            fail(OP, name, f"be on k_cache's {mesh}", t.device_mesh)
    lengths = (options[name] for name in ("max_seqlen_q", "max_seqlen_k"))
    cache = Cache(*(tensors[name] for name in CACHE_TENSORS), *lengths)
    check_cache(q, cache)
    softcap, scale = (x if x is None else as_float(x) for x in (options["softcap"], options["scale"]))
    check_options(q, options["causal"], options["window"], softcap, tensors["sinks"], scale)
    if v_cache.placements != k_cache.placements:
        fail(OP, "v_cache", f"be split as k_cache, {k_cache.placements}", v_cache.placements)
    packed = cache.cu_seqlens_q is not None
    placements = _placements_beside(k_cache, packed, cache.page_table is not None)
    if out is not None:
        check_cache_out(out, q, v_cache.shape[3])
        if out.placements != placements["q"]:
            fail(OP, "out", f"be split as the result, {placements['q']}", out.placements)
    parts = {
        name: (t.redistribute(placements=placements[name]) if name in placements else t).to_local()
        for name, t in given.items()
    }
    found = function(**parts, **{**options, "return_lse": True})

    def whole(t: Tensor, name: str, *shape: int) -> DTensor:
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(t, mesh, placements[name], run_check=False, shape=torch.Size(shape), stride=strides)

    *batch, queries, heads, _ = q.shape
    result = whole(found[0], "q", *q.shape[:-1], v_cache.shape[3]) if out is None else out
    return (result, whole(found[1], "lse", *batch, heads, queries)) if options["return_lse"] else result


def _placements_beside(cache: DTensor, packed: bool, paged: bool) -> dict[str, tuple[Placement, ...]]:
    """How each tensor but the caches and out is split beside a cache."""
    from torch.distributed.tensor import Replicate, Shard

    of_rows = 1 if packed else 2
    heads = {"q": of_rows, "k": of_rows, "v": of_rows, "lse": of_rows - 1, "sinks": 0}
    sequences = dict.fromkeys(("q", "k", "v", "lse", "cache_seqlens"), 0)
    processes, chosen = 1, []  # what is split over each dimension of the mesh
    for size, placement in zip(cache.device_mesh.shape, cache.placements, strict=True):
        if placement == Shard(2):
            processes *= size
            chosen.append(heads)
        elif placement == Shard(0) and not packed and not paged:
            chosen.append(sequences)
        elif placement == Replicate():
            chosen.append({})
        else:
            expected = "whole or split by heads"
            if not packed and not paged:
                expected += " or sequences"
            fail(OP, "k_cache", f"be {expected}", cache.placements)
    if cache.shape[2] % processes:
        fail(OP, "k_cache", f"have heads that {processes} processes share evenly", cache.shape[2])
    return {
        name: tuple(Shard(of[name]) if name in of else Replicate() for of in chosen)
        for name in (*heads, "cache_seqlens", "page_table", "cu_seqlens_q")
    }
