"""attention, its backward and caches on DTensors, two processes over fake kernels; selective checkpointing."""

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
START = """
import os
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from cute_kernels import attention, attention_with_kv_cache, merge_attention
from tests.attention.cache_cases import Layout, Sequences, cached, packed
from tests.attention.cases import BF16, Case, make_inputs, make_packed, same_bits
from tests.fakes import fake_kernels

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
whole, batch, rows, heads = Replicate(), Shard(0), Shard(1), Shard(2)
"""
ATTENTION = """
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
"""
CACHE = """
def check(of_cache, of_rows, of_out, of_lse, page_size=0, spare=None, pairs=2, **options):
    # rows have the bits of the call on whole tensors, and so has the cache; ``spare``: packed queries
    lengths, queries = [37, 3, 130], [3, 3, 3] if spare is None else [3, 1, 20]
    sequences = Sequences.make(lengths, 2 * pairs, pairs, 64, BF16, torch.Generator().manual_seed(0))
    before = [n - m for n, m in zip(lengths, queries)]
    arguments = cached(sequences, before, Layout(page_size, fill=0.0), max(lengths))
    new = {
        name: [t[n - m : n] for t, n, m in zip(getattr(sequences, name), lengths, queries)] for name in ("q", "k", "v")
    }
    if spare is None:
        arguments |= {name: torch.stack(rows) for name, rows in new.items()}
    else:
        arguments |= {name: packed(rows, spare)["q"] for name, rows in new.items()} | packed(new["q"], spare)
    arguments["sinks"] = torch.arange(2.0 * pairs)
    of_cache = dict.fromkeys(("k_cache", "v_cache"), of_cache)

    def split(name, t):
        if not isinstance(t, torch.Tensor):
            return t
        return distribute_tensor(t.clone(), mesh, [of_cache.get(name, of_rows if name in ("q", "k", "v") else whole)])

    parts = {name: split(name, t) for name, t in arguments.items()}
    with fake_kernels():
        wanted = attention_with_kv_cache(**arguments, return_lse=True, **options)
        found = attention_with_kv_cache(**parts, return_lse=True, **options)
        for name in ("k_cache", "v_cache"):
            assert same_bits(parts[name].full_tensor(), arguments[name]), name
        for name in ("k", "v"):  # they are in the cache now, and are not written again
            del arguments[name], parts[name]
        arguments["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
        parts["cache_seqlens"] = distribute_tensor(arguments["cache_seqlens"], mesh, [whole])
        parts["out"] = torch.zeros_like(found[0])
        again = attention_with_kv_cache(**parts, **options)
        assert again is parts["out"] and same_bits(again.full_tensor(), attention_with_kv_cache(**arguments, **options))
    assert [f.placements[0] for f in found] == [of_out, of_lse], [f.placements for f in found]
    for one, two in zip(found, wanted):
        assert same_bits(one.full_tensor(), two)
    on_cpu = attention_with_kv_cache(**parts, **options)  # plain torch
    assert on_cpu.placements[0] == of_out

def refused(message, **changes):
    sequences = Sequences.make([9, 5], 4, 2, 64, BF16, torch.Generator().manual_seed(0))
    arguments = cached(sequences, [9, 5], Layout(fill=0.0)) | {"q": torch.stack([t[-1:] for t in sequences.q])}
    parts = {name: distribute_tensor(t, mesh, [whole]) for name, t in arguments.items()} | changes
    for name, change in changes.items():
        if isinstance(change, Shard):
            parts[name] = distribute_tensor(arguments[name], mesh, [change])
    try:
        attention_with_kv_cache(**parts)
    except (TypeError, ValueError) as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)

check(batch, batch, batch, batch)  # of three sequences a process has two, the other one
check(batch, whole, batch, batch)
check(heads, heads, heads, Shard(1))
check(heads, rows, heads, Shard(1), window=(9, 0))
check(whole, batch, whole, whole)
check(heads, heads, heads, Shard(1), page_size=16)
check(heads, Shard(1), Shard(1), Shard(0), spare=2)  # packed: heads
check(heads, whole, Shard(1), Shard(0), page_size=16, spare=0)
check(whole, batch, whole, whole, page_size=32, spare=2, pairs=3)
refused("k_cache must be whole or split by heads or sequences", k_cache=rows, v_cache=rows)
refused("v_cache must be split as k_cache", k_cache=heads)
three = distribute_tensor(torch.zeros(2, 14, 3, 64, dtype=BF16), mesh, [heads])
six = distribute_tensor(torch.zeros(2, 1, 6, 64, dtype=BF16), mesh, [whole])
refused("k_cache must have heads that 2 processes share evenly", q=six, k_cache=three, v_cache=three)
refused("cache_seqlens must be a DTensor", cache_seqlens=torch.tensor([9, 5], dtype=torch.int32))
out = distribute_tensor(torch.zeros(2, 1, 4, 64, dtype=BF16), mesh, [heads])
refused("out must be split as the result", out=out)

inputs = make_inputs(Case(2, 5, 10, 4, 2, 64), torch.Generator().manual_seed(0))
halves = [(inputs[0], *(t[:, part] for t in inputs[1:])) for part in (slice(5), slice(5, 10))]
results = [attention(*half, return_lse=True) for half in halves]
outs, lses = zip(*results)
wanted = merge_attention(outs, lses)
for of_out, of_lse in ((batch, batch), (heads, Shard(1)), (rows, heads), (whole, whole)):
    parts = [[distribute_tensor(t, mesh, [p]) for t in ts] for ts, p in ((outs, of_out), (lses, of_lse))]
    found = merge_attention(*parts)
    assert [f.placements[0] for f in found] == [of_out, of_lse], [f.placements for f in found]
    for one, two in zip(found, wanted):
        assert same_bits(one.full_tensor(), two)
"""
END = """
dist.barrier()
dist.destroy_process_group()
print("done", flush=True)
os._exit(0)  # a thread of gloo can abort the process while the interpreter ends: see cute_kernels/cli/train.py
"""


@pytest.mark.skipif(not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="no gloo")
@pytest.mark.exhaustive
@pytest.mark.parametrize("part", [ATTENTION, CACHE], ids=["attention", "cache"])
def test_two_processes(part, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START + part + END, str(rank), str(tmp_path / "store")],
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
