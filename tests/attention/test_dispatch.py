"""The kernels' path of attention on the CPU, plain torch in place of the kernel."""

import math
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cute_kernels import UnsupportedDeviceError, attention
from cute_kernels.attention import launch, prewarm
from cute_kernels.attention.config import L2_BYTES, ForwardSpec, forward_config, heads_together
from cute_kernels.attention.launch.forward import regular
from cute_kernels.runtime import launches
from cute_kernels.runtime.targets import Target
from tests.attention.cases import BF16, FP16, HEAD_SIZES, Case, exact, gradients_of, make_inputs, same_bits
from tests.fakes import fake_kernels
from tests.runtime.thread_cases import first_calls


@pytest.fixture(autouse=True)
def jobs():
    with fake_kernels() as jobs:
        yield jobs


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_results(causal, head_size, dtype, generator):
    case = Case(2, 5, 9, 4, 2, head_size, causal, dtype)
    inputs = make_inputs(case, generator)
    wanted = exact(case, inputs, scale=0.25)
    out, lse = attention(*inputs, causal=causal, scale=0.25, return_lse=True)
    assert out.dtype is dtype and out.is_contiguous() and lse.dtype is torch.float32 and lse.shape == (2, 4, 5)
    torch.testing.assert_close(out.double(), wanted[0], atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.double(), wanted[1], atol=1e-5, rtol=1e-5)
    assert same_bits(attention(*inputs, causal=causal, scale=0.25), out)


def test_another_batch_and_length_compile_nothing(jobs, generator):
    for batch, len_q, len_k, heads in ((1, 1, 1, 1), (3, 200, 300, 4), (2, 7, 5000, 2)):
        attention(*make_inputs(Case(batch, len_q, len_k, heads, 1), generator), causal=True)
    assert len({repr(job) for job in jobs}) == 1


def test_a_model_finds_its_kernels_precompiled(jobs, generator):
    for dtype in (BF16, FP16):
        for head_size in HEAD_SIZES:
            for causal in (False, True):
                for pairs in (1, 2):
                    inputs = make_inputs(Case(1, 3, 3, 2, pairs, head_size, causal, dtype), generator)
                    function, dout = partial(attention, causal=causal, return_lse=True), torch.zeros(1, 3, 2, head_size)
                    for dlse in (None, torch.zeros(1, 2, 3)):
                        gradients_of(function, inputs, dout, dlse)
    assert set(jobs) == set(prewarm.specializations("sm_90a"))
    assert list(prewarm.specializations("sm_100a")) == []


def test_nothing_to_do(jobs):
    for shape in ((0, 3, 2, 64), (2, 0, 2, 64)):
        q, k = torch.zeros(shape, dtype=BF16), torch.zeros(shape[0], 5, 2, 64, dtype=BF16)
        assert attention(q, k, k).shape == shape
    q, k = torch.ones(1, 3, 2, 64, dtype=BF16), torch.zeros(1, 0, 2, 64, dtype=BF16)
    out, lse = attention(q, k, k, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()
    assert not jobs


def test_layouts_that_are_no_copy(generator):
    """Heads before rows, q, k and v in one matrix, strides of dimensions that have one element."""
    case = Case(2, 6, 6, 2, 2, 64)
    inputs = make_inputs(case, generator)
    wanted = attention(*inputs, causal=True)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs]
    packed = torch.stack(inputs, 2).unbind(2)
    for tensors in (heads_first, packed):
        assert same_bits(attention(*tensors, causal=True), wanted)
    q = inputs.q[:1, :1].as_strided((1, 1, 2, 64), (3, 5, 64, 1))
    assert same_bits(
        attention(q, *(t[:1] for t in inputs[1:]), causal=True),
        attention(q.clone(), *(t[:1] for t in inputs[1:]), causal=True),
    )
    assert regular(q).stride() == (64, 64, 64, 1)


def test_as_an_operator(generator):
    """It returns its results: torch.compile, the counter of operations, and opcheck see them."""
    q, k, v = make_inputs(Case(2, 5, 9, 4, 2, 64), generator)
    wanted = attention(q, k, v, causal=True, return_lse=True)
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, causal=True, return_lse=True), backend="aot_eager", fullgraph=True
    )
    for a, b in zip(compiled(q, k, v), wanted, strict=True):
        assert same_bits(a, b)
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v)
    assert counter.get_total_flops() == 4 * 2 * 4 * 5 * 9 * 64
    torch.library.opcheck(
        launch.attention_forward.registered, (q, k, v, True, 0.125), test_utils=("test_schema", "test_faketensor")
    )


def test_under_autocast(generator):
    inputs = make_inputs(Case(1, 5, 9, 4, 2, 64, dtype=torch.float32), generator)
    with torch.autocast("cpu", dtype=BF16):
        out = attention(*inputs)
    assert out.dtype is BF16 and same_bits(out, attention(*(t.to(BF16) for t in inputs)))


def test_a_gpu_without_kernels(generator, monkeypatch):
    monkeypatch.setattr(launches, "target_of", lambda index: Target("sm_100a", 148))
    with pytest.raises(UnsupportedDeviceError, match="attention: has kernels for compute"):
        attention(*make_inputs(Case(1, 2, 2, 1, 1), generator))


def test_threads_that_make_the_first_call_together(generator):
    inputs = make_inputs(Case(2, 5, 9, 4, 2), generator)
    first_calls((lambda q, k, v: attention(q, k, v, causal=True), tuple(inputs)), False)


def test_no_grad_is_enough(generator):
    q, k, v = make_inputs(Case(1, 2, 2, 1, 1), generator)
    q.requires_grad_()
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad


def test_heads_that_fit_into_the_cache_come_together():
    assert heads_together(128, 2, 8192, 4) == 4 * (L2_BYTES // (2 * 8192 * 128 * 2))
    assert heads_together(128, 2, 2**20, 4) == 4 and heads_together(64, 2, 1, 1) > 1000


def test_the_config_follows_from_the_head_size_alone():
    specs = {arguments[1] for _, arguments in prewarm.specializations("sm_90a")}
    found = {forward_config(spec) for spec in specs if type(spec) is ForwardSpec}
    assert len(found) <= len(HEAD_SIZES)
