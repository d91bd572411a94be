"""The backward of attention on a GPU: errors against fp64, and bits that depend on a row, or on a sequence, alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cute_kernels import attention
from cute_kernels.attention import prewarm, reference, reference_backward
from cute_kernels.attention.config import (
    BACKWARD_CONFIGS,
    delta_spec,
    finish_dkv_spec,
    finish_dq_spec,
)
from tests.attention.backward_cases import NAMES, SIZES, Saved, assert_same, case_of, spec_of
from tests.attention.cases import (
    BF16,
    BLOCK,
    FP16,
    Case,
    Inputs,
    gradients_of,
    make_inputs,
    make_packed,
    rms,
    same_bits,
)
from tests.precompiled import precompile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
HEADS = pytest.mark.parametrize("sizes", SIZES, ids=str)
MASKS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
GROUPS = pytest.mark.parametrize("pairs", [4, 2, 1], ids="pairs{}".format)
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])


@pytest.fixture(scope="module", autouse=True)
def precompiled():
    """One after the other the kernels take some seconds each."""
    from cute_kernels.attention.kernel_backward_sm90 import backward_sm90
    from cute_kernels.attention.kernel_delta import delta
    from cute_kernels.attention.kernel_finish_gradients import finish_dkv, finish_dq

    specs = [
        (spec_of(case_of(sizes, 1, 1, 1, 1, 1, causal, dtype), grouped), config)
        for sizes in SIZES
        for causal in (True, False)
        for grouped in (True, False)
        for dtype in (BF16, FP16)
        for config in BACKWARD_CONFIGS[sizes]
    ]
    others = [
        job
        for spec, config in specs
        for job in (
            (backward_sm90, ("sm_90a", spec, config)),
            (finish_dq, ("sm_90a", finish_dq_spec(spec), config)),
            (finish_dkv, ("sm_90a", finish_dkv_spec(spec._replace(grouped=True)), config)),
            *((delta, ("sm_90a", delta_spec(spec, has_lse_grad, config))) for has_lse_grad in (False, True)),
        )
    ]
    precompile([*prewarm.specializations("sm_90a"), *others])


def torch_errors(saved: Saved, wanted: tuple) -> list[float]:
    """The best rms errors of torch's own kernels. Their causal mask is top-left: only where that is the same."""
    found = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def call(q, k, v):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=saved.case.causal, enable_gqa=True).transpose(1, 2)

        try:
            with sdpa_kernel(backend):
                gradients = gradients_of(call, saved.inputs, saved.dout)
        except RuntimeError:  # a backend that does not take the case
            continue
        found.append([rms(a.double() - b) for a, b in zip(gradients, wanted, strict=True)])
    return [min(errors) for errors in zip(*found, strict=True)]


# ---- errors


ACCURACY = [
    *(case_of(sizes, 2, n, n, 4, 4, c) for n in (64, 128, 200, 1000) for sizes in SIZES for c in (True, False)),
    *(case_of(sizes, 2, n, n, 4, 2, c) for n in (129, 500) for sizes in SIZES for c in (True, False)),
    *(case_of(sizes, 1, n, n, 2, 1, True, FP16) for n in (129, 700) for sizes in SIZES),
]


@pytest.mark.parametrize("case", ACCURACY, ids=str)
def test_error(case, generator):
    """No more than 1.2 times that of the best of torch's own."""
    saved = Saved(case, generator)
    wanted, found = saved.exact(), saved.run()
    limits = torch_errors(saved, wanted)
    if not limits:
        pytest.skip("torch has no kernel for these head sizes")
    for name, a, b, limit in zip(NAMES, found, wanted, limits, strict=True):
        error = rms(a.double() - b)
        assert a.isfinite().all() and error <= 1.2 * limit + 1e-9, f"{name}: {error:.3e}, torch {limit:.3e}"


CONTRACT = [
    *(case_of(sizes, 1, n, n, 2, 1, c) for n in (1, 100, BLOCK + 1, 600) for sizes in SIZES for c in (True, False)),
    *(case_of(sizes, 2, 70, 400, 4, 2, True, FP16) for sizes in SIZES),
    Case(2, 70, 40, 2, 2, 64, True),
    Case(1, 300, 40, 3, 1, 128, True),
    Case(1, 300, 40, 3, 1, 256, True),
]


@pytest.mark.parametrize("through_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("case", CONTRACT, ids=str)
def test_is_the_contract_within_rounding(case, through_lse, generator):
    """The contract in torch differs in the order of sums within products alone.

    Of one key ds is the difference of two equal sums, each of a size of some ten: what is left of them is not compared.
    """
    saved = Saved(case, generator, through_lse)
    dlse = None if saved.dlse is None else saved.dlse.masked_fill(saved.lse == -math.inf, 0.0)
    saved.dlse = dlse
    wanted = reference_backward.kv_grid_backward(
        saved.dout, *saved.inputs, saved.out, saved.lse, dlse, causal=case.causal
    )
    exact = saved.exact()
    for name, a, b, full in zip(NAMES, saved.run(), wanted, exact, strict=True):
        error, rounding = rms(a.double() - b.double()), rms(full - b.double())
        assert error <= 0.7 * rounding + 1e-6, f"{name}: {error:.3e} of {rounding:.3e}"


@pytest.mark.parametrize(("sizes", "config"), [(s, c) for s, found in BACKWARD_CONFIGS.items() for c in found], ids=str)
@DTYPES
@MASKS
@GROUPS
def test_every_config_is_right(pairs, causal, dtype, sizes, config, generator):
    """Errors against fp64 are those of the contract in torch, within a tenth."""
    case = case_of(sizes, 2, 333, 333, 4, pairs, causal, dtype)
    saved = Saved(case, generator)
    exact = saved.exact()
    contract = reference_backward.kv_grid_backward(saved.dout, *saved.inputs, saved.out, saved.lse, causal=causal)
    for name, a, b, c in zip(NAMES, saved.run(config), exact, contract, strict=True):
        error, limit = rms(a.double() - b), 1.1 * rms(c.double() - b)
        assert a.isfinite().all() and error <= limit, f"{name}: {error:.3e}, contract {limit:.3e}"


# ---- bits


BITS = [case_of(sizes, 2, 333, 333, 4, 2, c) for sizes in SIZES for c in (True, False)]
BITS += [case_of(sizes, 2, 200, 517, 4, 4) for sizes in SIZES]
BITS += [case_of(sizes, 2, 1200, 1200, 4, 2, c) for sizes in SIZES for c in (True, False)]  # more than AHEAD * group
BITS += [Case(1, 517, 200, 4, 1, 128, True), Case(1, 517, 200, 4, 1, 256, True)]
EACH = pytest.mark.parametrize("case", BITS, ids=str)


@EACH
def test_every_config_and_number_of_ctas(case, generator):
    saved = Saved(case, generator, True)
    wanted = saved.run()
    for config in BACKWARD_CONFIGS[case.sizes]:
        for num_sms in (1, 7, 66, None):
            assert_same(saved.run(config, num_sms), wanted)


@EACH
def test_batch_and_place(case, generator):
    """A sequence has the bits that it has alone, wherever it is, whatever the others hold, NaN, too."""
    saved = Saved(case, generator)
    tensors = [*saved.inputs, saved.dout, saved.out, saved.lse]
    alone = [t[:1] for t in tensors]

    def run(tensors):
        q, k, v, dout, out, lse = tensors
        return saved.run(inputs=(q, k, v), dout=dout, out=out, lse=lse)

    wanted = run(alone)
    for batch, place in ((2, 0), (3, 1), (9, 8)):
        for filler in (0.5, math.nan, math.inf):
            others = [torch.full((batch, *t.shape[1:]), filler, dtype=t.dtype, device="cuda") for t in tensors]
            for t, one in zip(others, alone, strict=True):
                t[place] = one[0]
            assert_same([t[place : place + 1] for t in run(others)], wanted)


@HEADS
@MASKS
def test_other_heads_do_not_matter(causal, sizes, generator):
    """dq and, of heads of their own, dk and dv: any order of heads, any number of them."""
    saved = Saved(case_of(sizes, 1, 300, 300, 6, 6, causal), generator)
    wanted = saved.run()
    order = [4, 0, 5, 1]
    inputs = tuple(t[:, :, order] for t in saved.inputs)
    found = saved.run(inputs=inputs, dout=saved.dout[:, :, order], out=saved.out[:, :, order], lse=saved.lse[:, order])
    assert_same(found, [t[:, :, order] for t in wanted])


@HEADS
@MASKS
@GROUPS
def test_shared_heads(pairs, causal, sizes, generator):
    """dq is that of repeated heads; dk and dv are their sums in fp32, heads ascending, as far as rounding shows."""
    case = case_of(sizes, 2, 257, 300, 4, pairs, causal)
    saved = Saved(case, generator)
    found = saved.run()
    q, k, v = saved.inputs
    repeated = (q, *(t.repeat_interleave(4 // pairs, 2) for t in (k, v)))
    wanted = saved.run(inputs=repeated)
    assert_same(found[:1], wanted[:1], ("dq",))
    for a, b in zip(found[1:], wanted[1:], strict=True):
        total = b.double().unflatten(2, (pairs, -1)).sum(3)
        assert rms(a.double() - total) <= 2.0**-8 * rms(total)


@MASKS
@pytest.mark.parametrize("sizes", [(64, 64), (72, 40), (96, 96), (80, 96)], ids=str)
def test_channels_of_zeros_change_no_bit(sizes, causal, generator):
    """Each kernel up to 128 channels gives the gradients of that of 128."""
    case = case_of(sizes, 2, 333, 400, 4, 2, causal)
    inputs = make_inputs(case, generator)
    dout = torch.randn(*inputs.q.shape[:3], sizes[1], generator=generator, device="cuda").to(BF16)

    def call(q, k, v):
        return attention(q, k, v, causal=causal, scale=sizes[0] ** -0.5)

    found = gradients_of(call, inputs, dout)
    *wide, wide_dout = (F.pad(t, (0, 128 - t.shape[-1])) for t in (*inputs, dout))
    wanted = gradients_of(call, wide, wide_dout)
    assert_same(found, [a[..., : b.shape[-1]] for a, b in zip(wanted, found, strict=True)])


@HEADS
def test_a_causal_row_does_not_move_when_the_sequence_grows(sizes, generator):
    """Rows of dq see the keys before them; the rows' own outputs and gradients are the same."""
    saved = Saved(case_of(sizes, 1, 700, 700, 2, 1), generator)
    wanted = saved.run()[0]
    for length in (1, 64, 128, 129, 500):
        q, k, v, dout, out = (t[:, :length] for t in (*saved.inputs, saved.dout, saved.out))
        found = saved.run(inputs=(q, k, v), dout=dout, out=out.contiguous(), lse=saved.lse[..., :length].contiguous())
        assert_same(found[:1], [wanted[:, :length]], ("dq",))


@HEADS
def test_rows_of_queries_in_chunks(sizes, generator):
    """The last rows alone, as a chunk behind a prefix, have the bits of all rows' dq."""
    saved = Saved(case_of(sizes, 1, 500, 500, 2, 1), generator)
    wanted = saved.run()[0]
    q, k, v = saved.inputs
    for first in (499, 384, 250, 37):
        rows = slice(first, None)
        found = saved.run(
            inputs=(q[:, rows], k, v),
            dout=saved.dout[:, rows],
            out=saved.out[:, rows],
            lse=saved.lse[..., rows].contiguous(),
        )
        assert_same(found[:1], [wanted[:, rows]], ("dq",))


@HEADS
@MASKS
def test_memory_behind_the_tensors(causal, sizes, generator):
    """NaN before and behind each sequence's rows, and any strides."""
    saved = Saved(case_of(sizes, 2, 201, 130, 2, 1, causal), generator)
    wanted = saved.run()

    def padded(t: Tensor) -> Tensor:
        wide = torch.full((t.shape[0], t.shape[1] + 260, *t.shape[2:]), math.nan, dtype=t.dtype, device="cuda")
        wide[:, 130 : 130 + t.shape[1]] = t
        return wide[:, 130 : 130 + t.shape[1]]

    tensors = Inputs(*(padded(t) for t in saved.inputs))
    assert_same(saved.run(inputs=tensors, dout=padded(saved.dout), out=padded(saved.out)), wanted)
    heads_first = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in saved.inputs)
    assert_same(saved.run(inputs=heads_first, dout=saved.dout.transpose(1, 2).contiguous().transpose(1, 2)), wanted)


@HEADS
def test_nan_stays_where_it_is(sizes, generator):
    """A row's own NaN reaches its own dq; that of another head or sequence no one's."""
    saved = Saved(case_of(sizes, 2, 300, 300, 2, 2), generator)
    wanted = saved.run()
    dout = saved.dout.clone()
    dout[1, 77, 1] = math.nan
    dq, dk, dv = saved.run(dout=dout)
    assert dq[1, 77, 1].isnan().all()
    dq[1, 77, 1] = wanted[0][1, 77, 1]
    assert_same([dq], wanted[:1], ("dq",))
    for t, b in ((dk, wanted[1]), (dv, wanted[2])):
        assert same_bits(t[0], b[0]) and same_bits(t[1, :, 0], b[1, :, 0])


# ---- masks, sinks, packed sequences


OPTIONS = [{"window": (128, 0)}, {"window": (40, 30)}, {"causal": True, "softcap": 3.0}, {"causal": True}]


@pytest.mark.parametrize("sizes", [*SIZES, (96, 72), (160, 40), (200, 248)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_are_the_contract_within_rounding(options, sizes, generator):
    """With sinks; the kernels' tanh is the hardware's."""
    case = Case(2, 300, 400, 4, 2, sizes[0], False, BF16, sizes[1])
    inputs, sinks = make_inputs(case, generator), torch.randn(4, generator=generator, device="cuda")
    out, lse = reference.attention(*inputs, **options, sinks=sinks, return_lse=True)
    dout = torch.randn(out.shape, generator=generator, device="cuda").to(BF16)
    dlse = torch.randn(lse.shape, generator=generator, device="cuda")

    def call(function):
        return lambda q, k, v, sinks: function(q, k, v, **options, sinks=sinks, return_lse=True)

    found = gradients_of(call(attention), (*inputs, sinks), dout, dlse)
    exact = gradients_of(call(reference.attention), [t.double() for t in (*inputs, sinks)], dout, dlse)
    contract = reference_backward.kv_grid_backward(dout, *inputs, out, lse, dlse, **options)
    limits = [1.2 * rms(a.double() - b) for a, b in zip(contract, exact, strict=False)]
    for name, a, b, limit in zip(NAMES, found, exact, limits, strict=False):
        assert rms(a.double() - b) <= limit, f"{name}: {rms(a.double() - b):.3e}, contract {limit:.3e}"
    out, lse = attention(*inputs, **options, sinks=sinks, return_lse=True)  # as rounded: the sum may nearly cancel
    delta = (dout.double() * out.double()).sum(-1).transpose(1, 2) - dlse
    of_sinks = -((sinks.double().unsqueeze(1) - lse).exp() * delta).sum((0, 2))
    assert rms(found[3].double() - of_sinks) <= 1e-3 * rms(of_sinks)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_window_of_many_heads(sizes, generator):
    """A sequence, and a head of keys, have the bits that they have alone: blocks come in another order."""
    case = Case(3, 1400, 1400, 16, 2, sizes[0], False, BF16, sizes[1])
    inputs = make_inputs(case, generator)
    dout = torch.randn(*inputs.q.shape[:3], sizes[1], generator=generator, device="cuda").to(BF16)

    def call(q, k, v):
        return attention(q, k, v, window=(128, 0))

    found = gradients_of(call, inputs, dout)
    for i, pair in ((0, 1), (2, 0)):
        heads = slice(8 * pair, 8 * pair + 8)
        one = [t[i : i + 1] for t in (*inputs, dout)]
        assert_same([t[i : i + 1] for t in found], gradients_of(call, one[:3], one[3]))
        one = [t[i : i + 1, :, h] for t, h in zip((*inputs, dout), (heads, [pair], [pair], heads), strict=True)]
        wanted = gradients_of(call, one[:3], one[3])
        assert_same([t[i : i + 1, :, h] for t, h in zip(found, (heads, [pair], [pair]), strict=True)], wanted)


@pytest.mark.parametrize("sizes", [*SIZES, (96, 72), (160, 40), (200, 248), (128, 64)], ids=str)
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"window": (50, 0)}], ids=str)
def test_packed_is_dense(options, sizes, generator):
    """Sequences have the bits that they have alone; NaN behind the last one changes nothing and has no gradient."""
    case, lengths = Case(1, 1, 1, 4, 2, sizes[0], False, BF16, sizes[1]), ((300, 0, 65, 1, 513), (300, 7, 65, 129, 700))
    tensors, places = make_packed(case, *lengths, generator)
    tensors = Inputs(*(torch.cat([t, torch.full_like(t[:40], math.nan)]) for t in tensors))
    dout = torch.randn(*tensors.q.shape[:2], sizes[1], generator=generator, device="cuda").to(BF16)

    def call(**places):
        return lambda q, k, v: attention(q, k, v, **options, **places)

    found = gradients_of(call(**places), tensors, dout)
    starts = places["cu_seqlens_q"].tolist(), places["cu_seqlens_k"].tolist()
    for a, start in zip(found, (starts[0], starts[1], starts[1]), strict=True):
        assert (a[start[-1] :] == 0).all()
    for i in range(5):
        rows, keys = (slice(start[i], start[i + 1]) for start in starts)
        one = [t[None, place] for t, place in zip((*tensors, dout), (rows, keys, keys, rows), strict=True)]
        wanted = gradients_of(call(), one[:3], one[3])
        assert_same([t[None, place] for t, place in zip(found, (rows, keys, keys), strict=True)], wanted)


@pytest.mark.parametrize("sizes", [*SIZES, (160, 40)], ids=str)
def test_keys_that_are_not_used(sizes, generator):
    """NaN behind the used keys changes nothing; they have a gradient of 0."""
    case = case_of(sizes, 2, 200, 400, 4, 2, False)
    inputs = make_inputs(case, generator)
    dout = torch.randn(*inputs.q.shape[:3], sizes[1], generator=generator, device="cuda").to(BF16)
    for used in ((250, 130), (400, 0)):
        tensors = Inputs(*(t.clone() for t in inputs))
        for i, n in enumerate(used):
            tensors.k[i, n:] = tensors.v[i, n:] = math.nan
        lengths = torch.tensor(used, dtype=torch.int32, device="cuda")
        found = gradients_of(lambda q, k, v, n=lengths: attention(q, k, v, seqused_k=n), tensors, dout)
        for i, n in enumerate(used):
            one = [t[i : i + 1, :m] for t, m in zip((*inputs, dout), (200, n, n, 200), strict=True)]
            wanted = gradients_of(attention, one[:3], one[3])
            assert_same([t[i : i + 1, :m] for t, m in zip(found, (200, n, n), strict=True)], wanted)
            assert (found[1][i, n:] == 0).all() and (found[2][i, n:] == 0).all()


# ---- through autograd, streams, graphs, other work


@HEADS
@MASKS
def test_autograd_and_compiled(causal, sizes, generator):
    saved = Saved(case_of(sizes, 2, 300, 300, 4, 2, causal), generator, True)
    wanted = saved.run()

    def call(q, k, v):
        return attention(q, k, v, causal=causal, return_lse=True)

    assert_same(gradients_of(call, saved.inputs, saved.dout, saved.dlse), wanted)
    torch._dynamo.reset()  # a code object is compiled a few times at most
    compiled = torch.compile(call, fullgraph=True)
    assert_same(gradients_of(compiled, saved.inputs, saved.dout, saved.dlse), wanted)


def test_graph_and_stream(generator):
    saved = Saved(Case(2, 500, 500, 4, 2, 128), generator)
    wanted = saved.run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = saved.run()
    stream.synchronize()
    assert_same(found, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = saved.run()
    other = Saved(Case(2, 500, 500, 4, 2, 128), generator)
    names = "dout", "out", "lse"
    for source in (saved, other):
        kept = [t.clone() for t in (*saved.inputs, *(getattr(saved, name) for name in names))]
        targets = [*saved.inputs, *(getattr(saved, name) for name in names)]
        for target, t in zip(targets, [*source.inputs, *(getattr(source, name) for name in names)], strict=True):
            target.copy_(t)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(found, saved.run())
        for target, t in zip(targets, kept, strict=True):
            target.copy_(t)


@GROUPS
def test_beside_other_work(pairs, generator):
    """Other kernels occupy some of the SMs: 200 runs, and no deadlock."""
    saved = Saved(Case(2, 1500, 1500, 4, pairs, 128), generator)
    wanted = saved.run()
    a = torch.randn(2048, 2048, device="cuda", dtype=BF16)
    side = torch.cuda.Stream()
    for i in range(200):
        with torch.cuda.stream(side):
            a @ a[:, : 128 * (i % 16 + 1)]
        assert_same(saved.run(num_sms=None if i % 2 else i % 131 + 1), wanted)
