"""attention and its backward on DTensors, two processes on the CPU over fake kernels; selective checkpointing."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cute_kernels import attention
from cute_kernels.attention import launch
from tests.attention.cases import Case, make_inputs, same_bits
from tests.fakes import attention as fakes
from tests.fakes import fake_kernels

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from cute_kernels import attention
from tests.attention.cases import Case, make_inputs, make_packed, same_bits
from tests.fakes import fake_kernels

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
whole, batch, rows, heads = Replicate(), Shard(0), Shard(1), Shard(2)

def check(case, placements, of_out, of_lse):
    inputs = make_inputs(case, torch.Generator().manual_seed(0))
    with fake_kernels() as jobs:
        wanted = attention(*inputs, causal=True, return_lse=True)
        del jobs[:]
        q, k, v = (distribute_tensor(t, mesh, [p]) for t, p in zip(inputs, placements))
        found = attention(q, k, v, causal=True, return_lse=True)
    assert [f.placements[0] for f in found] == [of_out, of_lse], [f.placements for f in found]
    for one, two in zip(found, wanted):
        assert same_bits(one.full_tensor(), two)

def check_gradients(case, placement, lengths=None, sinks=False, **options):
    # those of tensors that are split are split as they, with the bits of those of whole tensors
    generator, places = torch.Generator().manual_seed(0), {}
    if lengths:
        inputs, places = make_packed(case, lengths, lengths, generator)
    else:
        inputs = make_inputs(case, generator)
    names = ["q", "k", "v"] + ["sinks"] * sinks
    tensors = [*inputs, torch.randn(case.heads, generator=generator)][: len(names)]

    def gradients(tensors, split):
        tensors = [t.requires_grad_() for t in tensors]
        given = {
            name: distribute_tensor(t, mesh, [whole]) if split and isinstance(t, torch.Tensor) else t
            for name, t in places.items()
        }
        results = attention(**dict(zip(names, tensors)), causal=True, return_lse=True, **given, **options)
        sum(t.float().nan_to_num(neginf=0.0).square().sum() for t in results).backward()
        return [t.grad for t in tensors]

    with fake_kernels():
        wanted = gradients([t.clone() for t in tensors], False)
        of_inputs = [placement] * 3 + [whole if placement == batch else Shard(0)]
        found = gradients([distribute_tensor(t, mesh, [p]) for t, p in zip(tensors, of_inputs)], True)
    for name, one, two in zip(names, found, wanted):
        if name != "sinks":
            assert one.placements[0] == placement, (name, one.placements)
            assert same_bits(one.full_tensor(), two), name
        else:  # of sequences that are split a sum of two parts
            torch.testing.assert_close(one.full_tensor(), two)

for n in (2, 3):
    check_gradients(Case(n, 5, 9, 4, 2, 64), batch)
    check_gradients(Case(n, 5, 9, 4, 2, 64), batch, sinks=True)
check_gradients(Case(2, 5, 9, 8, 4, 64), heads, sinks=True)
check_gradients(Case(2, 5, 9, 4, 2, 64), whole, window=(3, 0))
check_gradients(Case(1, 9, 9, 4, 2, 64), Shard(1), (3, 6), sinks=True)  # packed: heads
for n in (2, 3):  # of three sequences a process has two, the other one
    check(Case(n, 5, 9, 4, 2, 64), (batch,) * 3, batch, batch)
check(Case(2, 5, 9, 8, 4, 64), (heads,) * 3, heads, Shard(1))
check(Case(2, 5, 9, 4, 2, 64), (whole,) * 3, whole, whole)
check(Case(2, 5, 9, 4, 4, 64), (heads, whole, whole), heads, Shard(1))
check(Case(1, 5, 9, 6, 3, 64), (heads,) * 3, whole, whole)  # three heads of keys are gathered
check(Case(1, 6, 8, 2, 1, 64), (rows,) * 3, whole, whole)  # so is the length
dist.barrier()
dist.destroy_process_group()
print("done", flush=True)
os._exit(0)  # a thread of gloo can abort the process while the interpreter ends: see cute_kernels/cli/train.py
"""


@pytest.mark.skipif(not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="no gloo")
@pytest.mark.exhaustive
def test_two_processes(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0 and output.endswith("done\n"), output


def test_selective_checkpointing_keeps_what_it_returns(generator):
    """The backward's replay of a checkpoint that saves it does not launch it again."""
    q, k, v = make_inputs(Case(1, 5, 9, 2, 2, 64), generator)
    w = torch.ones(64, dtype=q.dtype, requires_grad=True)
    saved = launch.attention_forward.registered

    def policy(context, operator, *arguments, **options):
        return CheckpointPolicy.MUST_SAVE if operator is saved else CheckpointPolicy.PREFER_RECOMPUTE

    for options, times in (({"context_fn": lambda: create_selective_checkpoint_contexts(policy)}, 1), ({}, 2)):
        kernel = mock.patch.object(fakes, "forward_sm90", wraps=fakes.forward_sm90)
        with kernel as launched, fake_kernels():
            y = checkpoint(lambda w: attention(q, k, v) * w, w, use_reentrant=False, **options)
            (gradient,) = torch.autograd.grad(y.sum(), w)
            assert launched.call_count == times
            wanted = attention(q, k, v)
        assert same_bits(y.detach(), wanted)
        torch.testing.assert_close(gradient, wanted.sum((0, 1, 2)), atol=0.1, rtol=0.05)
