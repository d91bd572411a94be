"""The quantizers on DTensors, two processes on the CPU: placements of what they return, the reference's bytes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os
import sys
import torch
import torch.distributed as dist
import cute_kernels
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from tests.mxfp8.cases import Case, call, make_input, reference, seeded_generator

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
whole, rows, columns = Replicate(), Shard(0), Shard(1)

def bytes_of(t):
    return t.contiguous().view(torch.uint8)

def same(found, wanted):
    # Each process looks at its own part: gloo does not know 8-bit numbers
    assert found.shape == wanted.shape and found.dtype is wanted.dtype and found.stride() == wanted.stride()
    (placement,) = found.placements
    part = wanted if placement == whole else wanted.chunk(2, placement.dim)[rank]
    local = found.to_local()
    assert local.shape == part.shape and torch.equal(bytes_of(local), bytes_of(part))

def check(case, placement, *placements):
    x = make_input(case, seeded_generator(str(case), "cpu"))
    found = call(case, distribute_tensor(x, mesh, [placement]))
    wanted = call(case, x, reference)
    assert [f.placements[0] for f in found] == list(placements), (case, [f.placements for f in found])
    for one, two in zip(found, wanted, strict=True):
        same(one, two)
    for i in range(0, len(found), 2):
        y = cute_kernels.dequantize(found[i], found[i + 1])
        assert y.placements == found[i].placements
        same(y, reference.dequantize(wanted[i], wanted[i + 1]))

for layout in ("plain", "blocked"):
    for variant, outputs in (("colwise", 2), ("colwise_square", 2), ("dual", 4), ("dual_square", 4)):
        case = Case("3d_" + variant, (4, 64, 96), scale_layout=layout)
        check(case, rows, *[rows] * outputs)  # experts
        check(case, whole, *[whole] * outputs)
        check(case, columns, *[whole] * outputs)  # no rule: gathered
    check(Case("3d_dual", (3, 64, 96), scale_layout=layout), rows, *[rows] * 4)  # two and one
# The same tensor, other flags: each has its own rule
check(Case("rowwise", (128, 96)), rows, rows, rows)
check(Case("rowwise", (128, 96), scale_layout="blocked"), rows, whole, whole)
check(Case("rowwise", (128, 96)), rows, rows, rows)
check(Case("rowwise", (96, 128)), columns, columns, columns)
check(Case("colwise", (128, 128)), columns, columns, rows)
check(Case("colwise", (128, 96)), rows, rows, columns)
check(Case("dual", (128, 192)), rows, rows, rows, rows, columns)
check(Case("dual", (128, 192)), columns, columns, columns, columns, rows)
for variant, outputs in (("rowwise", 2), ("colwise", 2), ("dual", 4)):
    check(Case(variant, (96, 128)), rows, *[whole] * outputs)  # half of 96 rows is no number of blocks
    check(Case(variant, (128, 96)), columns, *[whole] * outputs)
    for placement in (rows, columns):
        check(Case(variant, (128, 128), scale_layout="blocked"), placement, *[whole] * outputs)
# What DTensor has gathered is row-major, its strides as a whole are not: of a square nothing else tells the two apart
case = Case("colwise", (128, 128))
wanted = call(case, make_input(case, seeded_generator(str(case), "cpu")), reference)

def gathered(t, placement):
    part = t if placement == whole else t.chunk(2, placement.dim)[rank]
    return DTensor.from_local(part.contiguous(), mesh, [placement], run_check=False, shape=t.shape, stride=t.stride())

for placements in ((whole, whole), (rows, columns), (columns, rows)):
    q, scale = (gathered(t, placement) for t, placement in zip(wanted, placements, strict=True))
    assert q.stride() == (1, 128) and q.to_local().is_contiguous()
    y = cute_kernels.dequantize(q, scale)
    assert y.placements == q.placements
    same(y, reference.dequantize(*wanted))
dist.barrier()
dist.destroy_process_group()
print("done", flush=True)
os._exit(0)  # a thread of gloo can abort the process while the interpreter ends: see cute_kernels/cli/train.py
"""


@pytest.mark.skipif(not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="no gloo")
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


def test_registered_with_the_first_dtensor_only():
    """Importing the library and using it on plain tensors does not load torch.distributed.tensor's rules."""
    program = """
import sys, torch, cute_kernels
before = set(sys.modules)
cute_kernels.quantize_rowwise(torch.zeros(32, 32))
torch.ops.cute_kernels.mxfp8_quantize(torch.zeros(32, 32), torch.float8_e4m3fn, True, False, False, "rceil", "plain")
assert "cute_kernels.mxfp8.sharding" not in sys.modules
assert not [name for name in set(sys.modules) - before if name.startswith("torch.distributed.tensor")]
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
