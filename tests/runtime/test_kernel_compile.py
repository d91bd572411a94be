"""Every public op in compiled code has the results and gradients that it has outside, bit by bit."""

import contextlib

import pytest
import torch

import cute_kernels.invariance.compiled  # noqa: F401  the backend's name
from cute_kernels import batch_invariant
from tests.runtime.bits import assert_same_bits
from tests.runtime.thread_cases import FORWARD_ONLY, OPS

FP32 = torch.float32
OF_ANY_DTYPE = ("reduction.", "scatter.")  # a cast in their forwards may return what it is given
# Torch's own operators around kernels, which Inductor alone rounds otherwise: a quotient, a user's sublayer
MADE_OF_TORCHS = {"merge_attention", "mhc.hyper_connection", "reduction.norm"}
# A block cannot begin in compiled code; dropout_mask is a forward of integers alone
DIFFERENTIABLE = [op for op in OPS if op not in FORWARD_ONLY | {"batch_invariant", "mhc.dropout_mask", "sample"}]
CASES = [(op, None) for op in DIFFERENTIABLE] + [(op, FP32) for op in DIFFERENTIABLE if op.startswith(OF_ANY_DTYPE)]


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_compiled(op, dtype, generator, compile_backend):
    """The gradients, too, which torch 2.11 loses of a tensor that two operators of a forward return."""
    block = contextlib.nullcontext
    if compile_backend == "inductor" and op in MADE_OF_TORCHS:
        compile_backend, block = "cute_kernels", batch_invariant  # whose sums the backend has everywhere
    function, tensors = OPS[op](generator, 64)
    if dtype is not None:
        tensors = tuple(t.to(dtype) if t.is_floating_point() else t for t in tensors)
    floats = [t for t in tensors if t.dtype in (torch.bfloat16, FP32)]

    def step(*tensors):
        results = function(*tensors)
        return results if isinstance(results, tuple) else (results,)

    torch._dynamo.reset()  # a code object is compiled a few times at most
    found = []
    for run in (step, torch.compile(step, backend=compile_backend, fullgraph=True)):
        for t in floats:
            t.requires_grad_()
        with block():
            results = run(*tensors)
            wanted = [y for y in results if y.requires_grad]
            gradients = torch.autograd.grad(wanted, floats, [torch.ones_like(y) for y in wanted]) if wanted else ()
        found.append((*results, *gradients))
    for eager, compiled in zip(*found, strict=True):
        assert_same_bits(compiled, eager)
