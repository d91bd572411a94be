"""Sums over ranks in one order: rank 0's elements, plus rank 1's, and so on, in fp32, rounded once.

``install(collectives="ordered")`` puts them in the place of torch's collectives that add. Each rank gets a shard of
every rank's tensor and adds up the shards; an all-reduce then gathers the sums. That takes a ring's bytes, and an
element's bits depend on the ranks' elements alone: not on the size of the message, nor on which collective, bucket or
backend it went through, nor on who came first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cute_kernels.runtime.checks import FLOATS, expect

DTYPES = (*FLOATS, torch.float64)


def _all_reduce(tensors: list[Tensor], process_group: Any, reduce_op: Any, *others: Any) -> Any:
    """Each tensor becomes its sum, or its mean."""
    group, is_mean = dist.ProcessGroup.unbox(process_group), reduce_op.op() == int(dist.ReduceOp.AVG)
    if not _takes(reduce_op, tensors):
        return NotImplemented
    for tensor in tensors:
        ranks, n = group.size(), tensor.numel()
        padded = tensor.new_zeros(-(-n // ranks) * ranks)
        padded[:n] = tensor.detach().reshape(-1)
        sums = _sum_of_shards(group, padded, is_mean)
        group._allgather_base(_bytes(padded), _bytes(sums)).wait()
        tensor.detach().copy_(padded[:n].view_as(tensor))
    return tensors, _done(tensors)


def _all_reduce_coalesced(tensors: list[Tensor], process_group: Any, reduce_op: Any, *others: Any) -> Any:
    found = _all_reduce(tensors, process_group, reduce_op)
    return found if found is NotImplemented else found[1]


def _reduce_scatter(output: Tensor, x: Tensor, process_group: Any, reduce_op: Any, *others: Any) -> Any:
    """``output``: this rank's shard of the sum, or mean, of the ranks' x."""
    found = _reduce_scatter_coalesced([output], [x], process_group, reduce_op)
    return found if found is NotImplemented else (output, found)


def _reduce_scatter_lists(
    outputs: list[Tensor], inputs: list[list[Tensor]], process_group: Any, reduce_op: Any, *others: Any
) -> Any:
    """As ``_reduce_scatter``, of shards that are tensors of their own."""
    for output, shards in zip(outputs, inputs, strict=True):
        sizes = [shard.numel() for shard in shards]
        expect(set(sizes) == {output.numel()}, "reduce_scatter", "input_list", f"have {output.numel()} elements", sizes)
    whole = [torch.cat([shard.reshape(-1) for shard in shards]) for shards in inputs]
    found = _reduce_scatter_coalesced(outputs, whole, process_group, reduce_op)
    return found if found is NotImplemented else (outputs, found)


def _reduce_scatter_coalesced(
    outputs: list[Tensor], inputs: list[Tensor], process_group: Any, reduce_op: Any, *others: Any
) -> Any:
    group, is_mean = dist.ProcessGroup.unbox(process_group), reduce_op.op() == int(dist.ReduceOp.AVG)
    if not _takes(reduce_op, (*outputs, *inputs)):
        return NotImplemented
    for output, x in zip(outputs, inputs, strict=True):
        n = group.size() * output.numel()
        expect(x.numel() == n, "reduce_scatter", "input", f"have {n} elements, output's on each rank", x.numel())
        expect(x.dtype == output.dtype, "reduce_scatter", "input", f"be of output's {output.dtype}", x.dtype, TypeError)
        sums = _sum_of_shards(group, x.detach().contiguous().view(-1), is_mean)
        output.detach().copy_(sums.view_as(output))
    return _done(outputs)


# By name. Functional collectives, and those of DTensor, arrive at these
ORDERED: dict[str, Callable[..., Any]] = {
    "c10d::allreduce_": _all_reduce,
    "c10d::allreduce_coalesced_": _all_reduce_coalesced,
    "c10d::_reduce_scatter_base_": _reduce_scatter,
    "c10d::reduce_scatter_": _reduce_scatter_lists,
    "c10d::reduce_scatter_tensor_coalesced_": _reduce_scatter_coalesced,
}


def adds_over_ranks(args: Sequence[Any]) -> bool:
    """Whether a collective of these arguments rounds; maxima and minima do not."""
    op = next((value.op() for value in args if isinstance(value, torch.ScriptObject) and value._has_method("op")), None)
    return op not in (int(dist.ReduceOp.MAX), int(dist.ReduceOp.MIN))


def _takes(reduce_op: Any, tensors: Sequence[Tensor]) -> bool:
    """Sums and means of dense tensors."""
    known = reduce_op.op() in (int(dist.ReduceOp.SUM), int(dist.ReduceOp.AVG))
    return known and all(t.dtype in DTYPES and t.layout is torch.strided for t in tensors)


def _sum_of_shards(group: Any, x: Tensor, is_mean: bool) -> Tensor:
    """(n,) of x's dtype: the sum, or mean, of this rank's shards of the ranks' x (ranks * n,)."""
    ranks = group.size()
    received = torch.empty_like(x)
    group.alltoall_base(_bytes(received), _bytes(x), [], []).wait()
    first, *others = received.view(ranks, -1)
    total = first.to(torch.promote_types(x.dtype, torch.float32))
    for shard in others:
        total += shard
    if is_mean:
        total /= ranks
    return total.to(x.dtype)


def _bytes(x: Tensor) -> Tensor:
    """Backends move bytes of any dtype."""
    return x.view(torch.uint8)


def _done(tensors: list[Tensor]) -> Any:
    """The work of a collective all of whose kernels are in the current stream; who waits for it waits for them."""
    devices = {t.device for t in tensors if t.device.type == "cuda"}
    future: torch.futures.Future = torch.futures.Future(devices=list(devices))
    future.set_result(tensors)
    return dist._Work.boxed(torch._C._distributed_c10d._create_work_from_future(future))
