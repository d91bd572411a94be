"""Ranks, each a process, whose sums must be added from rank 0 on: ``install(collectives="ordered")``."""

import contextlib
import time
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from cute_kernels import UncoveredOperatorError, install, uninstall
from tests.fakes import covered, fake_kernels
from tests.runtime.bits import assert_same_bits

DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = (1,), (7,), (5, 12), (3001,)


def compare(rank: int, ranks: int, backend: str, path: str, on_gpu: bool) -> None:
    """On one rank."""
    torch.set_num_threads(1)
    device = f"cuda:{rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(rank)
    warnings.filterwarnings("ignore", category=FutureWarning)
    with contextlib.nullcontext() if on_gpu else covered():
        install(collectives="ordered")
        dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=ranks)
        try:
            for check in (check_all_reduce, check_reduce_scatter, check_functional, check_others, check_gradients):
                check(rank, ranks, device)
            with contextlib.nullcontext() if on_gpu else fake_kernels():
                check_shards(rank, ranks, device)
        finally:
            dist.destroy_process_group()
            uninstall()


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Numbers of many magnitudes, so that the order of a sum is seen."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    exponents = torch.randint(-6, 6, shape, generator=generator)
    return torch.ldexp(torch.randn(shape, generator=generator), exponents).to(device, dtype)


def added(tensors: list[Tensor], is_mean: bool = False) -> Tensor:
    """One after the other."""
    total = tensors[0].to(torch.promote_types(tensors[0].dtype, torch.float32))
    for t in tensors[1:]:
        total = total + t
    return (total / len(tensors) if is_mean else total).to(tensors[0].dtype)


def check_all_reduce(rank: int, ranks: int, device: str) -> None:
    """Whoever comes last, waited for now or later, of strided tensors, too."""
    differ = 0
    for seed, (dtype, shape) in enumerate((d, s) for d in DTYPES for s in SHAPES):
        everyones = [of_rank(r, shape, dtype, device, seed) for r in range(ranks)]
        wanted, mean = added(everyones), added(everyones, is_mean=True)
        differ += not torch.equal(added(everyones[::-1]), wanted)
        for late in range(-1, ranks if shape == SHAPES[2] and dtype is torch.float32 else 0):
            time.sleep(0.1 * (rank == late))
            found = everyones[rank].clone()
            dist.all_reduce(found)
            assert_same_bits(found, wanted)
        found = everyones[rank].clone()
        work = dist.all_reduce(found, op=dist.ReduceOp.AVG, async_op=True)
        work.wait()
        assert_same_bits(found, mean)
        if len(shape) == 2:
            strided = everyones[rank].t().contiguous().t()
            dist.all_reduce(strided)
            assert_same_bits(strided, wanted)
    assert differ > 0 or ranks == 2  # another order is another sum
    lists = [[of_rank(r, shape, torch.float32, device) for shape in SHAPES] for r in range(ranks)]
    dist.all_reduce_coalesced(mine := [t.clone() for t in lists[rank]])
    for found, everyones in zip(mine, zip(*lists, strict=True), strict=True):
        assert_same_bits(found, added(list(everyones)))


def check_reduce_scatter(rank: int, ranks: int, device: str) -> None:
    """The shards of what an all-reduce gives, of one tensor and of a list."""
    for dtype in DTYPES:
        everyones = [of_rank(r, (ranks * 10, 3), dtype, device) for r in range(ranks)]
        wanted = added(everyones).chunk(ranks)[rank]
        found = torch.empty_like(wanted)
        dist.reduce_scatter_tensor(found, everyones[rank])
        assert_same_bits(found, wanted)
        dist.reduce_scatter(found.zero_(), list(everyones[rank].chunk(ranks)))
        assert_same_bits(found, wanted)


def check_functional(rank: int, ranks: int, device: str) -> None:
    """Those that DTensor and compiled graphs call."""
    everyones = [of_rank(r, (ranks * 4, 3), torch.bfloat16, device) for r in range(ranks)]
    group, wanted = dist.group.WORLD, added(everyones)
    assert_same_bits(functional.wait_tensor(functional.all_reduce(everyones[rank], "sum", group)), wanted)
    (found,) = functional.all_reduce_coalesced([everyones[rank]], "avg", group)
    assert_same_bits(functional.wait_tensor(found), added(everyones, is_mean=True))
    shard = functional.wait_tensor(functional.reduce_scatter_tensor(everyones[rank], "sum", 0, group))
    assert_same_bits(shard, wanted.chunk(ranks)[rank])


def check_others(rank: int, ranks: int, device: str) -> None:
    """Maxima and integers run; what has no order here is refused, and is not sent."""
    everyones = [of_rank(r, (5,), torch.float32, device) for r in range(ranks)]
    found = everyones[rank].clone()
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    assert_same_bits(found, torch.stack(everyones).amax(0))
    count = torch.tensor(rank, device=device)
    dist.all_reduce(count)
    assert count.item() == ranks * (ranks - 1) // 2
    for _ in range(300):  # a rank hung now and then where torch's kernel kept Python's lock
        dist.all_reduce(torch.tensor(rank, device=device))
    for refused in (lambda t: dist.all_reduce(t, op=dist.ReduceOp.PRODUCT), lambda t: dist.reduce(t, 0)):
        with pytest.raises(UncoveredOperatorError, match="collectives='ordered'. runs all-reduces"):
            refused(everyones[rank])
    with pytest.raises(ValueError, match=f"reduce_scatter: input must have {ranks} elements, .* got 5"):
        dist.distributed_c10d._get_default_group()._reduce_scatter_base(everyones[rank][:1], everyones[rank])


class Products(torch.nn.Module):
    """Its gradients are the inputs: nothing is added but over ranks."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.ones(n, device=device) for n in (100, 30000, 7))

    def forward(self, *xs: Tensor) -> list[Tensor]:
        return [x * weight for x, weight in zip(xs, self.weights, strict=True)]


def check_gradients(rank: int, ranks: int, device: str) -> None:
    """DistributedDataParallel: the same bits whatever its buckets; FSDP2, which divides the sum."""
    inputs = [[of_rank(r, (n,), torch.float32, device) for n in (100, 30000, 7)] for r in range(ranks)]
    model = fully_shard(Products(device), mesh=init_device_mesh(torch.device(device).type, (ranks,)))
    ys = model(*inputs[rank])
    torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    for weight, everyones in zip(model.weights, zip(*inputs, strict=True), strict=True):
        assert_same_bits(weight.grad.full_tensor(), added(list(everyones), is_mean=True))
    wanted = [added([x * (1.0 / ranks) for x in everyones]) for everyones in zip(*inputs, strict=True)]
    for bucket in (0.001, 25):
        model = DistributedDataParallel(Products(device), bucket_cap_mb=bucket)
        ys = model(*inputs[rank])
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
        for weight, gradient in zip(model.module.weights, wanted, strict=True):
            assert_same_bits(weight.grad, gradient)


def check_shards(rank: int, ranks: int, device: str) -> None:
    """DTensor's layer of two products, the first split by its rows, the second by its columns.

    Its partial results are added by rank. On GPUs the first has the bits of one that is not split, gradients, too.
    """
    shapes = (10, 64), (32 * ranks, 64), (48, 32 * ranks)
    x, up, down = (of_rank(0, shape, torch.bfloat16, device, seed) for seed, shape in enumerate(shapes))
    mesh = init_device_mesh(torch.device(device).type, (ranks,))
    placed = zip((x, up, down), (Replicate(), Shard(0), Shard(1)), strict=True)
    leaves = [distribute_tensor(t, mesh, [where]).requires_grad_() for t, where in placed]
    h = F.linear(*leaves[:2])
    y = F.linear(h, leaves[2]).redistribute(mesh, [Replicate()])
    hidden = [F.linear(x, part) for part in up.chunk(ranks)]
    parts = [F.linear(*both) for both in zip(hidden, down.chunk(ranks, dim=1), strict=True)]
    assert_same_bits(h.to_local().detach(), hidden[rank])
    assert_same_bits(y.to_local().detach(), added(parts))
    dy = of_rank(0, (10, 48), torch.bfloat16, device, seed=3)
    y.backward(distribute_tensor(dy, mesh, [Replicate()]))
    dh = [dy @ part for part in down.chunk(ranks, dim=1)]
    assert_same_bits(leaves[1].grad.to_local(), dh[rank].t() @ x)
    assert_same_bits(leaves[2].grad.to_local(), dy.t() @ hidden[rank])
    assert_same_bits(
        leaves[0].grad.full_tensor(), added([d @ part for d, part in zip(dh, up.chunk(ranks), strict=True)])
    )
    if x.is_cuda:
        assert_same_bits(torch.cat(hidden, 1), F.linear(x, up))
        assert_same_bits(torch.cat(dh, 1), dy @ down)


def start(ranks: int, backend: str, path: str, on_gpu: bool) -> None:
    torch.multiprocessing.spawn(compare, (ranks, backend, path, on_gpu), nprocs=ranks)
