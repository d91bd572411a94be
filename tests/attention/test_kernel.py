"""The kernels of attention on a GPU: errors against fp64, and bits that depend on a row alone."""

import math

import pytest
import torch
import torch.nn.functional as F

from cute_kernels import attention
from cute_kernels.attention import reference
from cute_kernels.attention.config import FORWARD_CONFIGS, ForwardSpec, forward_config
from cute_kernels.attention.launch.forward import ForwardLaunch
from cute_kernels.runtime.targets import target_of
from tests.attention.cases import BF16, BLOCK, FP16, HEAD_SIZES, LENGTHS, SPLIT, Case, Inputs, exact, make_inputs, rms
from tests.attention.on_gpu import HOPPER, assert_same, forward_job, run, torch_error
from tests.precompiled import precompile

pytestmark = HOPPER
HEADS = pytest.mark.parametrize("head_size", HEAD_SIZES)
MASKS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)


@pytest.fixture(scope="module", autouse=True)
def precompiled():
    """One after the other the kernels take some seconds each."""
    specs = [ForwardSpec(BF16, d, causal, d) for d in HEAD_SIZES for causal in (True, False)]
    others = [forward_job(spec, config) for spec in specs for config in FORWARD_CONFIGS[spec.sizes]]
    precompile([*(forward_job(spec._replace(dtype=FP16)) for spec in specs), *others])


# ---- errors


ACCURACY = [
    *(
        Case(2, n, n, 4, 2, d, c)
        for n in (1, 64, 128, 200, 1000, 2 * SPLIT + 77)
        for d in HEAD_SIZES
        for c in (True, False)
    ),
    *(Case(1, n, n, 2, 1, d, True, FP16) for n in (129, SPLIT + 1) for d in HEAD_SIZES),
    Case(16, 300, 300, 16, 16, 128, False),
    Case(1, 3 * SPLIT, 3 * SPLIT, 2, 2, 64, True),
]


@pytest.mark.parametrize("case", ACCURACY, ids=str)
def test_error(case, generator):
    """No more than 1.2 times that of the best of torch's own."""
    inputs = make_inputs(case, generator)
    wanted, of_rows = exact(case, inputs)
    out, lse = run(inputs, case.causal)
    assert out.isfinite().all()
    error, limit = rms(out.double() - wanted), torch_error(inputs, wanted, case.causal)
    assert error <= 1.2 * limit + 1e-9, f"{error:.3e}, torch {limit:.3e}"
    torch.testing.assert_close(lse.double(), of_rows, atol=1e-5, rtol=1e-5)


CONTRACT = [
    *(
        Case(1, n, n, 2, 1, d, c)
        for n in (100, BLOCK + 1, SPLIT + 1, 2 * SPLIT + 300)
        for d in HEAD_SIZES
        for c in (True, False)
    ),
    Case(2, 70, 2 * SPLIT + 1, 4, 2, 128, True, FP16),
    Case(2, 70, 40, 2, 2, 64, True),
]


@pytest.mark.parametrize("case", CONTRACT, ids=str)
def test_is_the_contract_within_rounding(case, generator):
    """The contract in torch differs in the order of sums within products alone."""
    inputs = make_inputs(case, generator)
    wanted = reference.kv_grid(*inputs, causal=case.causal)
    out, lse = run(inputs, case.causal)
    full, _ = exact(case, inputs)
    assert rms(out.double() - wanted.out.double()) <= 0.5 * rms(full - wanted.out.double()) + 1e-9
    assert (out == wanted.out).float().mean() > 0.8
    empty = wanted.lse == -math.inf
    assert torch.equal(lse == -math.inf, empty) and (out.transpose(1, 2)[empty] == 0).all()
    torch.testing.assert_close(lse[~empty], wanted.lse[~empty], atol=1e-5, rtol=1e-5)


def unusual(kind: str, generator: torch.Generator, head_size: int) -> Inputs:
    """Scores of one extreme kind; the first channel of q makes them."""
    length = 2 * SPLIT + 50
    q, k, v = make_inputs(Case(1, length, length, 2, 1, head_size), generator)
    place = torch.arange(length, device=q.device)
    if kind == "large":  # to +-1e4
        k = k * (1e4 / 30)
    elif kind == "one key":
        k[0, 1000] *= 50
    elif kind == "equal":
        k = torch.zeros_like(k)
    else:
        q, k = torch.zeros_like(q), torch.zeros_like(k)
        q[..., 0] = 1.0
        step = head_size**0.5 / reference.LOG2E  # of scores, to a factor of two
        by_key = {
            "rising": place // BLOCK * 9.0 * step,  # a rescale in every block
            "slowly rising": place // BLOCK * 0.125 * step,  # none
            "falling": -(place // BLOCK) * 9.0 * step,
            "splits up": (place >= SPLIT) * 200.0 * step,
            "splits down": (place >= SPLIT) * -200.0 * step,
        }[kind]
        k[..., 0] = by_key.view(1, -1, 1).to(k.dtype)
    return Inputs(q, k, v)


@HEADS
@pytest.mark.parametrize(
    "kind", ["large", "one key", "equal", "rising", "slowly rising", "falling", "splits up", "splits down"]
)
def test_unusual_scores(kind, head_size, generator):
    inputs = unusual(kind, generator, head_size)
    wanted, of_rows = reference.attention(*(t.double() for t in inputs), causal=True, return_lse=True)
    out, lse = run(inputs, True)
    assert out.isfinite().all() and lse.isfinite().all()
    error, limit = rms(out.double() - wanted), torch_error(inputs, wanted, True)
    assert error <= 1.2 * limit + 1e-9, f"{error:.3e}, torch {limit:.3e}"
    torch.testing.assert_close(lse.double(), of_rows, atol=1e-4, rtol=1e-5)


# ---- bits


@HEADS
@MASKS
@DTYPES
def test_batch_size_and_place(causal, head_size, dtype, generator):
    """T1, T2: the first sequence alone, first, last, among others."""
    for length in (100, SPLIT + 65):
        inputs = make_inputs(Case(5, length, length, 4, 2, head_size, causal, dtype), generator)
        wanted = run(Inputs(*(t[:1] for t in inputs)), causal)
        for batch in (2, 3, 5):
            found = run(Inputs(*(t[:batch] for t in inputs)), causal)
            assert_same(tuple(t[:1] for t in found), wanted)
        order = [3, 0, 1, 4, 0]
        found = run(Inputs(*(t[order] for t in inputs)), causal)
        assert_same(tuple(t[1:2] for t in found), wanted)
        assert_same(tuple(t[4:] for t in found), wanted)


@HEADS
@MASKS
def test_neighbours(causal, head_size, generator):
    """T3: what other sequences and heads hold, NaN and infinity included, changes nothing."""
    length = SPLIT + 200
    inputs = make_inputs(Case(3, length, length, 4, 2, head_size, causal), generator)
    wanted = run(inputs, causal)
    for value in (0.0, math.nan, math.inf, 3e38):
        q, k, v = (t.clone() for t in inputs)
        for t in (q, k, v):
            t[0], t[2], t[1, :, -1] = value, value, value
        if q.shape[2] > 2:
            q[1, :, 2] = value  # the other query head of the last pair
        found = run(Inputs(q, k, v), causal)
        assert_same((found[0][1, :, :2], found[1][1, :2]), (wanted[0][1, :, :2], wanted[1][1, :2]))


@HEADS
@MASKS
def test_every_config_and_number_of_ctas(causal, head_size, generator):
    """T10, T11: rows of a tile, warpgroups, turns, stages; 1, 7, 66, all SMs."""
    for case in (
        Case(2, 2 * SPLIT + 77, 2 * SPLIT + 77, 4, 2, head_size, causal),
        Case(1, 3 * SPLIT + 300, 3 * SPLIT + 300, 2, 1, head_size, causal),
        Case(3, 65, 300, 2, 1, head_size, causal),
        Case(1, 300, 65, 2, 1, head_size, causal),
    ):
        inputs = make_inputs(case, generator)
        wanted = run(inputs, causal)
        spec = ForwardSpec(BF16, head_size, causal, head_size)
        for config in FORWARD_CONFIGS[spec.sizes]:
            launch = ForwardLaunch.of(target_of(0), spec, config)
            for num_sms in (1, 7, 66, 132) if config == forward_config(spec) else (132, 50):
                found = torch.full_like(wanted[0], math.nan), torch.full_like(wanted[1], math.nan)
                launch._replace(num_sms=num_sms).run(*inputs, *found, head_size**-0.5)
                assert_same(found, wanted)


@HEADS
@MASKS
def test_heads(causal, head_size, generator):
    """T12: keys and values that heads share are the same as repeated ones; the order of heads."""
    inputs = make_inputs(Case(2, 333, SPLIT + 333, 8, 2, head_size, causal), generator)
    wanted = run(inputs, causal)
    repeated = Inputs(inputs.q, *(t.repeat_interleave(4, 2) for t in inputs[1:]))
    assert_same(run(repeated, causal), wanted)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0)).tolist()
    found = run(Inputs(*(t[:, :, order] for t in repeated)), causal)
    assert_same(found, (wanted[0][:, :, order], wanted[1][:, order]))
    for head in (0, 5):
        found = run(Inputs(*(t[:, :, head : head + 1] for t in repeated)), causal)
        assert_same(found, (wanted[0][:, :, head : head + 1], wanted[1][:, head : head + 1]))


@HEADS
@DTYPES
def test_a_growing_sequence(head_size, dtype, generator):
    """T13: a causal row does not move when the sequence grows behind it."""
    length = 2 * SPLIT + 200
    inputs = make_inputs(Case(1, length, length, 2, 1, head_size, True, dtype), generator)
    out, lse = run(inputs, True)
    for n in LENGTHS:
        found = run(Inputs(*(t[:, :n] for t in inputs)), True)
        assert_same(found, (out[:, :n], lse[..., :n]))


@HEADS
def test_chunks(head_size, generator):
    """T5: the queries of a causal sequence in chunks, cut anywhere, against the keys so far."""
    length = 2 * SPLIT + 200
    inputs = make_inputs(Case(2, length, length, 4, 2, head_size), generator)
    out, lse = run(inputs, True)
    cuts = [0, 1, 17, 64, 65, 300, 301, SPLIT - 1, SPLIT, SPLIT + 1, SPLIT + 129, 2 * SPLIT - 1, 2 * SPLIT + 1, length]
    for first, last in zip(cuts, cuts[1:], strict=False):
        found = run(Inputs(inputs.q[:, first:last], inputs.k[:, :last], inputs.v[:, :last]), True)
        assert_same(found, (out[:, first:last], lse[..., first:last]))
    for i in range(70):  # one query a chunk
        found = run(Inputs(inputs.q[:, i : i + 1], inputs.k[:, : i + 1], inputs.v[:, : i + 1]), True)
        assert_same(found, (out[:, i : i + 1], lse[..., i : i + 1]))


@HEADS
def test_full_rows_are_causal_rows_of_the_end(head_size, generator):
    """The mask is no part of a row's arithmetic: the last query sees all keys either way. Every length of keys."""
    for length in LENGTHS:
        inputs = make_inputs(Case(2, 70, length, 2, 1, head_size), generator)
        full, causal = run(inputs, False), run(inputs, True)
        assert_same((full[0][:, -1:], full[1][..., -1:]), (causal[0][:, -1:], causal[1][..., -1:]))
        alone = run(Inputs(inputs.q[:, -1:], *inputs[1:]), False)
        assert_same(alone, (full[0][:, -1:], full[1][..., -1:]))


@HEADS
@MASKS
def test_repeated_runs(causal, head_size, generator):
    inputs = make_inputs(Case(2, SPLIT + 500, SPLIT + 500, 16, 4, head_size, causal), generator)
    wanted = run(inputs, causal)
    for _ in range(50):
        assert_same(run(inputs, causal), wanted)


# ---- NaN


@HEADS
def test_nan_of_a_query_is_its_own(head_size, generator):
    length = SPLIT + 100
    inputs = make_inputs(Case(1, length, length, 2, 1, head_size), generator)
    out, lse = run(inputs, True)
    for i in (0, 70, SPLIT + 3):
        q = inputs.q.clone()
        q[0, i, 1, 3] = math.nan
        found, of_rows = run(Inputs(q, *inputs[1:]), True)
        assert found[0, i, 1].isnan().all() and of_rows[0, 1, i].isnan()
        found[0, i, 1], of_rows[0, 1, i] = out[0, i, 1], lse[0, 1, i]
        assert_same((found, of_rows), (out, lse))


@HEADS
def test_nan_of_a_key_reaches_the_rows_that_see_it(head_size, generator):
    length = SPLIT + 100
    inputs = make_inputs(Case(1, length, length, 2, 2, head_size), generator)
    out, lse = run(inputs, True)
    for j in (0, 100, SPLIT - 1, SPLIT + 1):
        k = inputs.k.clone()
        k[0, j, 1, 3] = math.nan
        found, of_rows = run(Inputs(inputs.q, k, inputs.v), True)
        assert found[0, j:, 1].isnan().all() and of_rows[0, 1, j:].isnan().all()
        found[0, j:, 1], of_rows[0, 1, j:] = out[0, j:, 1], lse[0, 1, j:]
        assert_same((found, of_rows), (out, lse))


@HEADS
def test_nan_of_a_value_stays_in_its_column(head_size, generator):
    """Rows that see it have it; rows of the same head that do not may; no other."""
    length = SPLIT + 100
    inputs = make_inputs(Case(2, length, length, 2, 2, head_size), generator)
    out, lse = run(inputs, True)
    v = inputs.v.clone()
    v[1, SPLIT + 5, 1, 3] = math.nan
    found, of_rows = run(Inputs(*inputs[:2], v), True)
    assert found[1, SPLIT + 5 :, 1, 3].isnan().all() and found.isnan().sum() <= length
    assert not found[1, : SPLIT - 200, 1].isnan().any()
    found[1, :, 1, 3] = out[1, :, 1, 3]
    assert_same((found, of_rows), (out, lse))


# ---- layouts, streams, graphs


@HEADS
def test_layouts(head_size, generator):
    """Heads before rows; q, k and v in one matrix; rows in a wider one; strides of single elements."""
    case = Case(2, 300, 300, 4, 4, head_size)
    inputs = make_inputs(case, generator)
    wanted = run(inputs, True)
    heads_first = Inputs(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs))
    packed = Inputs(*torch.stack(inputs, 2).unbind(2))
    wide = Inputs(*(F.pad(t, (0, 8, 0, 1, 0, 3))[:, :300, :4, :head_size] for t in inputs))
    for found in (heads_first, packed, wide):
        assert not found.q.is_contiguous()
        assert_same(run(found, True), wanted)
    one = Inputs(*(t[:1, :, :1].as_strided((1, 300, 1, head_size), (3, t.stride(1), 5, 1)) for t in inputs))
    assert_same(run(one, True), (wanted[0][:1, :, :1], wanted[1][:1, :1]))


def test_keys_expanded_over_heads(generator):
    """A stride of 0."""
    inputs = make_inputs(Case(2, 300, 300, 4, 1, 128), generator)
    expanded = Inputs(inputs.q, *(t.expand(-1, -1, 4, -1) for t in inputs[1:]))
    assert_same(run(expanded, True), run(inputs, True))


def test_rows_beyond_the_last_are_not_written(generator):
    """A tile's rows behind the sequence's are another sequence's."""
    inputs = make_inputs(Case(1, 65, 65, 2, 1, 128), generator)
    spec = ForwardSpec(BF16, 128, True, 128)
    memory = torch.full((2, 200, 2, 128), 7.0, dtype=BF16, device="cuda")
    rows = torch.full((3, 2, 65), 7.0, device="cuda")
    ForwardLaunch.of(target_of(0), spec, forward_config(spec)).run(*inputs, memory[:1, :65], rows[1:2], 0.1)
    assert (memory[0, 65:] == 7).all() and (memory[1] == 7).all() and (rows[0] == 7).all() and (rows[2] == 7).all()
    assert_same((memory[:1, :65], rows[1:2]), run(inputs, True, scale=0.1))


def test_scale(generator):
    inputs = make_inputs(Case(1, 200, 200, 2, 1, 64), generator)
    wanted, of_rows = reference.attention(*(t.double() for t in inputs), scale=0.3, return_lse=True)
    out, lse = run(inputs, False, scale=0.3)
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), of_rows, atol=1e-5, rtol=1e-5)


def test_graph_and_stream(generator):
    inputs = make_inputs(Case(2, 500, 500, 4, 2, 128), generator)
    wanted = run(inputs, True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = run(inputs, True)
    stream.synchronize()
    assert_same(found, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(inputs, True)
    other = make_inputs(Case(2, 500, 500, 4, 2, 128), generator)
    for source in (inputs, other, inputs):
        kept = [t.clone() for t in inputs]
        for target, t in zip(inputs, source, strict=True):
            target.copy_(t)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(found, run(inputs, True))
        for target, t in zip(inputs, kept, strict=True):
            target.copy_(t)


def test_compiled(generator):
    inputs = make_inputs(Case(2, 300, 300, 4, 2, 64), generator)
    function = torch.compile(lambda q, k, v: attention(q, k, v, causal=True, return_lse=True), fullgraph=True)
    assert_same(function(*inputs), run(inputs, True))
