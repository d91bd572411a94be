"""Threads that make the first calls of every public op together: compiling, loading, launching, autograd."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.runtime.thread_cases import CALLS, OPS, first_calls

ROOT = Path(__file__).parents[2]
# Widths that nothing else has here, one for each test: their kernels, where a width is static, are compiled by a thread
SIZES = dict(zip(CALLS, itertools.count(1032, 8), strict=False))


@pytest.mark.parametrize(("op", "autograd"), CALLS)
def test_first_calls(op, autograd, generator):
    call = OPS[op](generator, SIZES[op, autograd])
    torch.cuda.synchronize()
    first_calls(call, autograd)


PROGRAM = """
import torch
from tests.runtime.thread_cases import FORWARD_ONLY, OPS, THREADS, assert_same, results_of, together
ops = list(OPS)
calls = {op: OPS[op](torch.Generator().manual_seed(0), 72) for op in ops}
calls = {op: (function, tuple(t.to("cuda") for t in tensors)) for op, (function, tensors) in calls.items()}
torch.cuda.synchronize()

def work(thread):
    first = thread * len(ops) // THREADS
    with torch.cuda.stream(torch.cuda.Stream()):
        found = {op: results_of(calls[op], op not in FORWARD_ONLY) for op in ops[first:] + ops[:first]}
        torch.cuda.current_stream().synchronize()
    return found

for found in together(work):
    for op in ops:
        assert_same(found[op], results_of(calls[op], op not in FORWARD_ONLY))
print("the same in all threads")
"""


def test_a_process_that_begins_with_threads():
    """Each begins with another op: modules are imported, and kernels loaded, by several threads at once."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-4000:]
    assert "the same in all threads" in run.stdout
