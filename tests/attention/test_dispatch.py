"""The kernels' path of attention on the CPU, plain torch in place of the kernel."""

import math
import sys
from functools import partial
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cute_kernels import attention
from cute_kernels.attention import config, launch, prewarm, reference
from cute_kernels.attention.launch.forward import regular
from cute_kernels.attention.op.gradients import CALLS
from cute_kernels.runtime import launches
from tests.attention.cases import (
    BF16,
    FP16,
    HEAD_SIZES,
    Case,
    Inputs,
    exact,
    gradients_of,
    make_inputs,
    make_packed,
    same_bits,
)
from tests.fakes import fake_kernels, recorded_launches
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


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_model_finds_its_kernels_precompiled(arch, generator):
    window = (16, 0)
    masks = ({"causal": True}, {}, {"causal": True, "window": window})
    with fake_kernels(arch) as jobs:
        for dtype in (BF16, FP16):
            for d, dv in config.HEAD_SIZES:
                dense = make_inputs(Case(1, 3, 3, 2, 1, d, True, dtype, dv), generator)
                tensors, lengths = make_packed(Case(1, 3, 3, 2, 1, d, True, dtype, dv), (1, 2), (2, 1), generator)
                for mask in masks:
                    attention(*dense, **mask)
                    attention(*tensors, **mask, **lengths)
                    if d == 64 and mask:
                        attention(*dense, **mask, sinks=torch.zeros(2))
                        attention(*tensors, **mask, **lengths, sinks=torch.zeros(2, dtype=dtype))
                    if d in (128, 256) and mask:
                        attention(*dense, **mask, softcap=3)
                        attention(*tensors, **mask, **lengths, softcap=3)
            long = make_inputs(Case(1, 1, 1025, 1, 1, 64, True, dtype), generator)
            packed, starts = make_packed(Case(1, 1, 1, 1, 1, 64, True, dtype), (1,), (1025,), generator)
            attention(*long)
            for mask in ({"causal": True}, {"causal": True, "window": (1024, 0)}):
                for sinks in (None, torch.zeros(1)):
                    attention(*long, **mask, sinks=sinks)
                    attention(*packed, **mask, **starts, sinks=sinks)
            for d, dv in config.BACKWARD_CONFIGS if arch == "sm_90a" else ():
                for pairs in (1, 2):
                    case = Case(1, 3, 3, 2, pairs, d, True, dtype, dv)
                    dense = make_inputs(case, generator)
                    tensors, lengths = make_packed(case, (1, 2), (2, 1), generator)
                    for mask in masks:
                        function = partial(attention, **mask, return_lse=True)
                        gradients_of(function, dense, torch.zeros(1, 3, 2, dv), torch.zeros(1, 2, 3))
                        function = partial(function, **lengths)
                        gradients_of(function, tensors, torch.zeros(3, 2, dv), torch.zeros(2, 3))
                    many = make_inputs(Case(1, 80, 80, 2, pairs, d, True, dtype, dv), generator)
                    for causal in (False, True) if d == 128 else ():
                        function = partial(attention, causal=causal, return_lse=True)
                        gradients_of(function, many, torch.zeros(1, 80, 2, dv), torch.zeros(1, 2, 80))
    assert set(jobs) == {
        job
        for job in prewarm.specializations(arch)
        if not isinstance(job[1][1], (config.DecodeSpec, config.AppendSpec)) and not getattr(job[1][1], "cached", False)
    }


OPTIONS = [
    {"window": (3, 0)},
    {"window": (None, 2)},
    {"causal": True, "window": (2, 5), "softcap": 3.0, "sinks": torch.tensor([0.0, 1.0, -1.0, 5.0])},
    {"softcap": 2.0},
    {"causal": True, "window": (-1, 7)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", [(64, 64), (72, 40), (192, 128), (200, 8)], ids=str)
def test_options(sizes, options, generator):
    """Dense, with fewer keys used, packed; into given memory."""
    d, dv = sizes
    case = Case(2, 5, 9, 4, 2, d, options.get("causal", False), BF16, dv)
    inputs = make_inputs(case, generator)
    wanted = reference.attention(*(t.double() for t in inputs), **options, return_lse=True)
    out, lse = attention(*inputs, **options, return_lse=True)
    assert out.shape == (2, 5, 4, dv) and out.is_contiguous()
    torch.testing.assert_close(out.double(), wanted[0], atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.double(), wanted[1], atol=1e-5, rtol=1e-5)
    longer = Inputs(inputs.q, *(torch.cat([t, t], 1) for t in inputs[1:]))
    used = torch.tensor([9, 9], dtype=torch.int32)
    assert same_bits(attention(*longer, **options, seqused_k=used), out)
    target = torch.empty(5, 2, 4, dv, dtype=BF16).transpose(0, 1)
    found = attention(*inputs, **options, out=target, return_lse=True)
    assert found[0] is target and same_bits(target, out) and same_bits(found[1], lse)
    cu_q, cu_k = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 9, 18], dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 5, "max_seqlen_k": 9}
    rest = torch.ones(3, 4, d, dtype=BF16)
    found = attention(
        torch.cat([inputs.q.flatten(0, 1), rest]), *(t.flatten(0, 1) for t in inputs[1:]), **options, **lengths,
        return_lse=True,
    )  # fmt: skip
    assert same_bits(found[0][:10], out.flatten(0, 1)) and (found[0][10:] == 0).all()
    assert same_bits(found[1][:, :10], lse.transpose(0, 1).flatten(1)) and (found[1][:, 10:] == -math.inf).all()


def test_packed_lengths_compile_nothing(jobs, generator):
    for lengths in ((1, 2), (5,), (7, 0, 3)):
        tensors, of_lengths = make_packed(Case(1, 3, 3, 2, 1), lengths, lengths, generator)
        attention(*tensors, causal=True, **of_lengths)
    assert len({repr(job) for job in jobs}) == 1


def test_no_keys_at_all(jobs):
    q, k, cu = torch.ones(4, 2, 64, dtype=BF16), torch.zeros(0, 2, 64, dtype=BF16), torch.tensor([0, 1, 3])
    lengths = {"cu_seqlens_q": cu.int(), "cu_seqlens_k": cu.int() * 0, "max_seqlen_q": 2, "max_seqlen_k": 0}
    out, lse = attention(q, k, k, **lengths, sinks=torch.tensor([1.0, 2.0]), return_lse=True)
    assert (out == 0).all() and lse.tolist() == [[1.0] * 3 + [-math.inf], [2.0] * 3 + [-math.inf]]
    out, lse = attention(q[None], k[None], k[None], sinks=torch.tensor([1.0, 2.0]), return_lse=True)
    assert (out == 0).all() and lse.tolist() == [[[1.0] * 4, [2.0] * 4]]
    assert not jobs


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
    tensors, lengths = make_packed(Case(1, 5, 9, 4, 2, 64), (2, 3), (4, 5), generator)
    with FlopCounterMode(display=False) as counter:
        attention(*tensors, **lengths)
    assert counter.get_total_flops() == 4 * 5 * 4 * 4 * 64
    torch.library.opcheck(
        launch.attention_forward.registered, (q, k, v, True, 0.125), test_utils=("test_schema", "test_faketensor")
    )


def test_under_autocast(generator):
    inputs = make_inputs(Case(1, 5, 9, 4, 2, 64, dtype=torch.float32), generator)
    with torch.autocast("cpu", dtype=BF16):
        out = attention(*inputs)
    assert out.dtype is BF16 and same_bits(out, attention(*(t.to(BF16) for t in inputs)))


@pytest.mark.parametrize("sizes", [(64, 64), (72, 40), (256, 256)], ids=str)
def test_on_sm100(sizes, generator):
    """Other tiles, and a workspace for all."""
    d, dv = sizes
    case = Case(2, 257, 9, 4, 2, d, True, BF16, dv)
    inputs, (packed, lengths) = make_inputs(case, generator), make_packed(case, (1, 257), (9, 3), generator)
    calls = ((inputs, {}), (packed, lengths))
    wanted = [attention(*tensors, causal=True, return_lse=True, **options) for tensors, options in calls]
    with fake_kernels("sm_100a", num_sms=3), launches.observed() as seen:
        found = [attention(*tensors, causal=True, return_lse=True, **options) for tensors, options in calls]
    rows = config.FORWARD_SM100_CONFIGS[config.kernel_sizes(d, dv)].tile_rows
    assert [kernel.name for kernel, *_ in seen] == [f"attention_forward (tile rows {rows})"] * 2
    for a, b in zip(sum(found, ()), sum(wanted, ()), strict=True):
        assert same_bits(a, b)


def test_threads_that_make_the_first_call_together(generator):
    inputs = make_inputs(Case(2, 5, 9, 4, 2), generator)
    first_calls((lambda q, k, v: attention(q, k, v, causal=True), tuple(inputs)), False)


def test_no_grad_is_enough(generator):
    q, k, v = make_inputs(Case(1, 2, 2, 1, 1), generator)
    q.requires_grad_()
    for enabled in (False, True, False, True):
        with torch.set_grad_enabled(enabled):
            assert attention(q, k, v).requires_grad is enabled


def test_how_many_configs_calls_take():
    jobs = (arguments for _, arguments in prewarm.specializations("sm_90a"))
    found = {(job[1].sizes, job[2]) for job in jobs if isinstance(job[1], config.ForwardSpec)}
    # The first one; of 64 two others where rows see few keys, of all but 64 q in registers, of 128 both of windows, too
    assert len(found) == 2 * len(config.HEAD_SIZES) - 1 + 2 + 2


def test_few_keys_take_tiles_of_fewer_rows(jobs, generator):
    for options, len_k, warpgroups in (
        ({"window": (128, 0)}, 3000, 2),
        ({"window": (1023, 0)}, 3000, 2),
        ({"window": (1024, 0)}, 3000, 3),
        ({"window": (9, -1)}, 3000, 3),
        ({"causal": True}, 1024, 2),
        ({"causal": True}, 1025, 3),
        ({}, 1024, 2),
        ({}, 1025, 3),
    ):
        q, k, v = make_inputs(Case(1, 3, len_k, 2, 1, 64), generator)
        attention(q, k, v, **options)
        chosen = next(a for _, a in reversed(jobs) if isinstance(a[1], config.ForwardSpec))[2]
        assert (chosen.warpgroups, chosen.q_stages) == (warpgroups, 2 if warpgroups == 2 else 1)
    for masks, rows in (({"window": True}, 128), ({"causal": True}, 128), ({}, 192)):
        packed = config.ForwardSpec(BF16, 64, **{"causal": False, **masks}, packed_q=True, packed_k=True)
        chosen = config.forward_config(packed, 128)
        assert (chosen.tile_rows, chosen.q_stages) == (rows, 1)


def test_windows_of_128_channels_take_the_last_tiles_first():
    window = config.ForwardSpec(BF16, 128, False, window=True)
    for spec, wanted in (
        (window, True),
        (window._replace(softcap=True, sinks=True), True),
        (window._replace(packed_q=True, packed_k=True), False),
        (window._replace(used_k=True, cached=True), False),
        (config.ForwardSpec(BF16, 128, True), False),
    ):
        chosen = config.forward_config(spec)
        assert (chosen.last_first, chosen.masks_by_side) == (wanted, wanted)


@pytest.mark.parametrize("sizes", config.HEAD_SIZES, ids=str)
def test_where_q_is_in_registers(sizes):
    """At 128 channels but for packed sequences, caches and fp16 with softcap, at more and at 96 without other options,
    at 64 nowhere.
    """

    def in_registers(spec: config.ForwardSpec) -> bool:
        return config.forward_config(spec).q_steps > 0

    for causal, window in ((True, False), (False, False), (False, True)):
        spec = config.ForwardSpec(BF16, sizes[0], causal, sizes[1], window)
        with_options = sizes[0] == 128
        assert in_registers(spec) == (with_options or (sizes[0] > 64 and not window))
        for other in ("softcap", "sinks", "used_k", "padded"):
            assert in_registers(spec._replace(**{other: True})) == with_options
        for other in ("packed_q", "packed_k"):
            assert not in_registers(spec._replace(**{other: True}))
        assert not in_registers(spec._replace(used_k=True, cached=True))
        assert not in_registers(spec._replace(dtype=FP16, softcap=True))


def test_the_order_of_tiles():
    spec = config.ForwardSpec(BF16, 128, True)
    assert config.pairs_tiles(spec, 2048, 132, 32, 8192) and not config.pairs_tiles(spec, 2048, 132, 16, 16384)
    assert not config.pairs_tiles(spec, 500, 132, 32, 8192)
    assert not config.pairs_tiles(spec._replace(causal=False), 2048, 132, 32, 8192)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("head_size", [64, 72, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_cached_call_launches_what_the_operator_launches(causal, head_size, arch, generator):
    """At the first call and at another one, with a gradient and without; the operator has no entry."""
    for sizes in ((1, 1, 1, 1, 1), (3, 200, 300, 4, 2), (2, 700, 64, 2, 1), (9, 300, 2000, 8, 8)):
        inputs = make_inputs(Case(*sizes, head_size), generator)
        with recorded_launches(arch, num_sms=7) as seen:
            for tensors in (inputs, [t.requires_grad_() for t in inputs]):
                for _ in range(2):
                    attention(*tensors, causal=causal)
            assert len(CALLS.guarded) == 1
            launch.attention_forward.function(*(t.detach() for t in inputs), causal, head_size**-0.5)
        assert len(seen) == 5 and all(other == seen[4] for other in seen)


def test_cached_calls(generator):
    """Results, gradients and what is observed; nothing is checked again."""
    case = Case(2, 5, 9, 4, 2, causal=True)
    inputs = [t.requires_grad_() for t in make_inputs(case, generator)]

    def call(scale: float | None = None):
        with launches.observed() as seen:
            out, lse = attention(*inputs, causal=True, scale=scale, return_lse=True)
        gradients = torch.autograd.grad((out.float().sum() + lse.sum()), inputs)
        return (out, lse, *gradients), [(kernel.name, *rest) for kernel, *rest in seen if "forward" in kernel.name]

    first, seen = call()
    other, _ = call(0.5)
    with mock.patch.object(sys.modules[attention.__module__], "check_attention", side_effect=AssertionError):
        for scale, wanted in ((None, first), (0.5, other)):
            found, again = call(scale)
            assert again == seen and all(map(same_bits, found, wanted))
            assert same_bits(attention(*inputs, causal=True, scale=scale), wanted[0])
    assert not same_bits(first[0], other[0])


@pytest.mark.parametrize("options", [{"causal": 1}, {"scale": True}, {"softcap": False}, {"window": ()}], ids=str)
def test_a_bad_option_after_a_good_one(options, generator):
    """1, 1.0 and True are equal, but not all of them are good."""
    inputs = make_inputs(Case(1, 5, 5, 1, 1), generator)
    attention(*inputs, causal=True, scale=1.0)
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        attention(*inputs, **{"causal": True, "scale": 1.0} | options)


def test_autocast_is_not_cached(generator):
    """Its dtype may be another one at the next call."""
    inputs = make_inputs(Case(1, 5, 5, 1, 1), generator)
    for dtype in (BF16, FP16):
        with torch.autocast("cpu", dtype=dtype):
            assert attention(*inputs).dtype is dtype
    assert not CALLS.guarded
