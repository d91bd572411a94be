"""Ranks that share experts, each a process, against one process with all tokens."""

import contextlib
import itertools
import os

import torch
import torch.distributed as dist

from cute_kernels import moe
from tests.fakes import fake_kernels
from tests.moe.cases import assert_same_bits, make_layer, run_layer
from tests.norm.cases import seeded_generator

EXPERTS, K, HIDDEN, WIDTH = 8, 2, 24, 16
GRADIENTS = ("dx", "dlogits", "dgate_up", "ddown", "dgate_up_bias", "ddown_bias")


def compare(rank: int, ranks: int, backend: str, path: str, on_gpu: bool) -> None:
    """On one rank: tokens unevenly spread, a rank without tokens, all tokens to one rank's experts."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.set_num_threads(1)
    device = f"cuda:{rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=ranks)
    try:
        with contextlib.nullcontext() if on_gpu else fake_kernels():
            for sizes, by_ranks, one_sided, biased in (
                ([13, 5, 1, 8][:ranks], False, False, False),
                ([0, 9, 70, 0][:ranks], True, False, True),
                ([7, 20, 0, 3][:ranks], True, True, True),
            ):
                run(rank, ranks, sizes, by_ranks, one_sided, biased, device)
    finally:
        dist.destroy_process_group()
    os._exit(0)  # a thread of gloo can abort the process while the interpreter ends: see cute_kernels/cli/train.py


def run(rank: int, ranks: int, sizes: list[int], by_ranks: bool, one_sided: bool, biased: bool, device: str) -> None:
    generator = seeded_generator(str(sizes), device)
    layer = make_layer(sum(sizes), HIDDEN, WIDTH, EXPERTS, generator, biased=biased)
    if one_sided:
        layer.logits[:, EXPERTS // ranks :] -= 100.0
    ends = [0, *itertools.accumulate(sizes)]
    segments = torch.tensor(ends[1:], dtype=torch.int32, device=device) if by_ranks else None
    whole = run_layer(layer, K, segments=segments)
    mine, here = slice(ends[rank], ends[rank + 1]), EXPERTS // ranks
    of_rank = slice(rank * here, (rank + 1) * here)
    parameters = layer.gate_up, layer.down, *((layer.gate_up_bias, layer.down_bias) if biased else ())
    tensors = layer.x[mine], layer.logits[mine], *(t[of_rank] for t in parameters)
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    x, logits, gate_up, down, *biases = leaves
    given = dict(zip(("gate_up_bias", "down_bias"), biases, strict=False))
    call = moe.ExpertParallel()
    y = call(x, moe.route(logits, K), gate_up, down, **given, by_ranks=by_ranks)
    assert_same_bits(y.detach(), whole["y"][mine], "y")
    gradients = torch.autograd.grad(y, leaves, layer.dy[mine])
    for name, found in zip(GRADIENTS, gradients, strict=False):
        assert_same_bits(found, whole[name][of_rank if name in GRADIENTS[2:] else mine], name)
    with torch.no_grad():
        assert_same_bits(call(x, moe.route(logits, K), gate_up, down, **given), y.detach(), "without autograd")
        plain = call(x, moe.route(logits, K), gate_up, down, **given, backend="reference")
    torch.testing.assert_close(plain, y.detach(), atol=3e-2, rtol=3e-2)


def start(ranks: int, backend: str, path: str, on_gpu: bool) -> None:
    torch.multiprocessing.spawn(compare, (ranks, backend, path, on_gpu), nprocs=ranks)
