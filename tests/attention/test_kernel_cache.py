"""Attention over a cache on a GPU: its rows have the bits of the forward's, whatever the batch, pages and chunks."""

import functools
import math

import pytest
import torch
from torch import Tensor

from cute_kernels import attention, attention_with_kv_cache
from cute_kernels.attention import reference_cache
from cute_kernels.attention.config import (
    DecodeConfig,
    DecodeSpec,
    ForwardSpec,
    forward_config,
    grid_for,
    kernel_sizes,
    prefill_spec,
    prefills,
)
from cute_kernels.attention.launch import decode as launch_decode
from cute_kernels.runtime import launches
from cute_kernels.runtime.targets import target_of
from tests.attention.cache_cases import LATE, WAYS, Layout, Sequences, cached, choose_way, packed, rows_of
from tests.attention.cases import BF16, FP16, HEAD_SIZES, SPLIT, bits, rms
from tests.precompiled import precompile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
HEADS = pytest.mark.parametrize("head_size", HEAD_SIZES)
WALKS = pytest.mark.parametrize("way", WAYS)
SIZES = [(96, 96), (80, 72), (192, 128), (192, 192), (256, 256)]
LAYOUTS = [Layout(), Layout(16), Layout(32, seed=1), Layout(64, seed=2), Layout(128, seed=3), Layout(256, seed=4)]
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT, 2 * SPLIT + 77]
Found = tuple[Tensor, Tensor]


@pytest.fixture(scope="module", autouse=True)
def precompiled():
    from cute_kernels.attention.kernel_decode_sm90 import decode_sm90
    from cute_kernels.attention.kernel_forward_sm90 import forward_sm90

    specs = [
        DecodeSpec(dtype, d, d, is_packed, rows)
        for d in HEAD_SIZES
        for dtype in (BF16, FP16)
        for is_packed, rows in ((True, 0), (True, 16), (True, 32), (True, 64), (True, 128), (False, 0), (False, 16))
        if dtype is BF16 or (is_packed and rows in (0, 16))
    ]
    jobs = [(decode_sm90, ("sm_90a", spec, DecodeConfig(few_rows=True))) for spec in specs if spec.dtype is BF16]
    specs += [DecodeSpec(BF16, *size, True, rows) for size in SIZES for rows in (0, 16)]
    specs += [DecodeSpec(BF16, 128, 128, True, 16, *options) for options in ((True, None), (False, BF16), (True, BF16))]
    configs = DecodeConfig(), DecodeConfig(sequential=True)
    jobs += [(decode_sm90, ("sm_90a", spec, config)) for spec in specs for config in configs]
    late = [DecodeSpec(BF16, *size, True, rows) for size in (*((d, d) for d in HEAD_SIZES), *SIZES) for rows in (0, 16)]
    late.append(DecodeSpec(BF16, 128, 128, True, 16, True, BF16))
    jobs += [
        (decode_sm90, ("sm_90a", spec, DecodeConfig(few_rows=few, merges_late=True)))
        for spec in late
        for few in (False, True)
    ]
    forwards = [ForwardSpec(dtype, d, True, d) for d in HEAD_SIZES for dtype in (BF16, FP16)]
    for d, dv in SIZES:
        sizes = kernel_sizes(d, dv)
        forwards.append(ForwardSpec(BF16, sizes[0], True, sizes[1], padded=sizes != (d, dv)))
    forwards += [prefill_spec(spec) for spec in specs if spec.head_size_v <= 192]
    jobs += [(forward_sm90, ("sm_90a", spec, forward_config(spec))) for spec in forwards]
    precompile(jobs)


@pytest.fixture
def walk(monkeypatch):
    """Chooses a CTA for a split, one for all, or the forward's kernel."""
    yield functools.partial(choose_way, monkeypatch)
    launches.forget()


def whole(sequences: Sequences, i: int, **options) -> Found:
    """(out, lse) of every row of a sequence, by the forward."""
    q, k, v = (t[i][None] for t in (sequences.q, sequences.k, sequences.v))
    out, lse = attention(q, k, v, causal=True, return_lse=True, **options)
    return out[0], lse[0]


def assert_same(found: Found, wanted: Found, what: object) -> None:
    """The bits of out (rows, heads, head size) and lse (heads, rows); says which rows and heads differ."""
    assert found[0].shape == wanted[0].shape and found[1].shape == wanted[1].shape, what
    wrong = (bits(found[0]) != bits(wanted[0])).any(-1)
    if wrong.any():
        where = wrong.nonzero()[:5].tolist()
        far = (found[0].double() - wanted[0].double()).abs().max().item()
        pytest.fail(f"{what}: out of {wrong.sum().item()} of {wrong.numel()} rows differs by up to {far}: {where}")
    wrong = bits(found[1]) != bits(wanted[1])
    assert not wrong.any(), (
        f"{what}: lse of {wrong.sum().item()} of {wrong.numel()} rows: {wrong.nonzero()[:5].tolist()}"
    )


def assert_rows(sequences: Sequences, lengths: list[int], queries: list[int], layout: Layout, **options) -> None:
    """The last rows of prefixes have the bits that the forward of the whole sequence gives them."""
    found = rows_of(sequences, lengths, queries, layout, **options)
    for i, (n, m) in enumerate(zip(lengths, queries, strict=True)):
        out, lse = whole(sequences, i, **options)
        assert_same(found[i], (out[n - m : n], lse[:, n - m : n]), f"sequence {i}, {m} of {n}, {layout}, {options}")


@HEADS
@WALKS
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.page_size))
def test_a_row_has_the_bits_of_the_forward(layout, way, head_size, walk, generator):
    """T4, T6, T8, T9: one query, at every kind of length; what is behind the keys is NaN."""
    walk(way)
    sequences = Sequences.make(LENGTHS, 8, 2, head_size, BF16, generator)
    assert_rows(sequences, LENGTHS, [1] * len(LENGTHS), layout)


@HEADS
def test_rows_of_many_splits(head_size, walk, generator):
    """More than a thread that merges loads together, and as many; rows for which its warps take two turns."""
    from cute_kernels.attention.kernel_decode_epilogue import MERGED_AHEAD

    walk("parallel")
    lengths = [MERGED_AHEAD * SPLIT, MERGED_AHEAD * SPLIT + 1, 40 * SPLIT + 77]
    sequences = Sequences.make(lengths, 8, 1, head_size, BF16, generator)
    assert_rows(sequences, lengths, [1, 1, 1], Layout(16))


@pytest.mark.parametrize("size", [*((d, d) for d in HEAD_SIZES), *SIZES], ids=str)
def test_late_merges(size, walk, generator):
    """As many splits as a warp loads together, one more, and other numbers; few rows of a tile, and whole tiles."""
    from cute_kernels.attention.kernel_decode_late import merged_ahead

    walk(LATE)
    d, dv = size
    split, ahead = grid_for(d, dv).split, merged_ahead(dv)
    lengths = [300, (ahead + 7) * split + 77, ahead * split, 3 * split + 5, ahead * split + 1]
    sequences = Sequences.make(lengths, 4, 1, d, BF16, generator, dv)
    for queries, layout in (([1] * 5, Layout()), ([1, 2, 1, 40, 1], Layout(16))):
        assert_rows(sequences, lengths, queries, layout)


def test_late_merges_of_other_calls(walk, monkeypatch, generator):
    """1 to 66 SMs and all, again and again; windows that leave tiles with one split; softcap and sinks."""
    walk(LATE)
    lengths, queries = [5 * SPLIT + 77, 300, SPLIT + 1, 2 * SPLIT, 3 * SPLIT], [1, 100, 70, 1, 300]
    sequences = Sequences.make(lengths, 8, 2, 128, BF16, generator)
    for window in ((SPLIT + 200, 0), (128, 0)):
        assert_rows(sequences, lengths, queries, Layout(16), window=window)
    sinks = torch.randn(8, generator=generator, device="cuda").to(BF16)
    assert_rows(sequences, lengths, queries, Layout(16), softcap=5.0, sinks=sinks)
    assert_rows(sequences, lengths, queries, Layout())
    wanted = rows_of(sequences, lengths, queries, Layout())
    for num_sms in (1, 2, 7, 66):
        with monkeypatch.context() as patch:
            patch.setattr(launches, "target_of", lambda index, n=num_sms: target_of(index)._replace(num_sms=n))
            launches.forget()
            for _ in range(3):
                for i, found in enumerate(rows_of(sequences, lengths, queries, Layout())):
                    assert_same(found, wanted[i], f"sequence {i} on {num_sms} SMs")


@WALKS
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_head_sizes(size, way, walk, generator):
    """Those of other grids, and those that run as the next larger one."""
    d, dv = size
    if way == "forward" and not prefills(dv, 1000, 1, 1000, 1000, 1, 1):
        pytest.skip("not used")
    walk(way)
    split = grid_for(d, dv).split
    lengths = [split + 77, 2 * split + 1, 300, 5]
    sequences = Sequences.make(lengths, 4, 2, d, BF16, generator, dv)
    for layout in (Layout(), Layout(16)):
        assert_rows(sequences, lengths, [1, 3, 100, 2], layout)


@HEADS
@WALKS
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_chunks(dtype, way, head_size, walk, generator):
    """T5: decode, chunks of a prompt and whole prompts in one batch, cut anywhere."""
    walk(way)
    lengths = [2 * SPLIT + 77, SPLIT + 1, 300, 300, 1, SPLIT, 2 * SPLIT + 1]
    sequences = Sequences.make(lengths, 8, 2, head_size, dtype, generator)
    for layout in (Layout(), Layout(16)):
        assert_rows(sequences, lengths, [1, 2, 300, 17, 1, 129, 2 * SPLIT + 1], layout)
        assert_rows(sequences, [n - n // 3 for n in lengths], [1, 200, 100, 1, 1, 64, 65], layout)


@HEADS
@pytest.mark.parametrize(("heads", "pairs"), [(3, 3), (5, 1), (16, 2), (70, 1)])
def test_groups(heads, pairs, head_size, walk, generator):
    """T12: rows of a tile are (query, head of the group), of any number."""
    lengths = [SPLIT + 77, 130, 5]
    sequences = Sequences.make(lengths, heads, pairs, head_size, BF16, generator)
    for way in WAYS:
        walk(way)
        assert_rows(sequences, lengths, [1, 40, 3], Layout(16))


@HEADS
def test_the_batch(head_size, generator):
    """T1, T2, T3: a sequence alone, in the midst of others, beside NaN."""
    lengths = [SPLIT + 300, 40, 2 * SPLIT + 1, 700, SPLIT + 1]
    sequences = Sequences.make(lengths, 8, 2, head_size, BF16, generator)
    queries = [1, 3, 1, 20, 2]
    wanted = rows_of(sequences, lengths, queries, Layout(16))
    for order in ([2], [4, 2, 0], [3, 1, 2, 2, 0, 4], [2] * 40, [1] * 70 + [2]):
        found = rows_of(
            sequences.of(order), [lengths[i] for i in order], [queries[i] for i in order], Layout(16, seed=len(order))
        )
        for i, pair in zip(order, found, strict=True):
            assert_same(pair, wanted[i], f"sequence {i} of {order}")
    for value in (math.nan, math.inf, 3e38):
        spoilt = Sequences(*([t.clone() for t in tensors] for tensors in (sequences.q, sequences.k, sequences.v)))
        for tensors in (spoilt.q, spoilt.k, spoilt.v):
            for i in (0, 1, 3, 4):
                tensors[i].fill_(value)
        assert_same(rows_of(spoilt, lengths, queries, Layout(16))[2], wanted[2], f"beside {value}")


@HEADS
@WALKS
def test_number_of_ctas(way, head_size, walk, monkeypatch, generator):
    """T11: 1, 7, 66 SMs, and all; items of several turns."""
    walk(way)
    lengths = [2 * SPLIT + 77, 300, SPLIT + 1, 64]
    sequences = Sequences.make(lengths, 8, 2, head_size, BF16, generator)
    wanted = rows_of(sequences, lengths, [1, 100, 3, 1], Layout())
    for num_sms in (1, 7, 66):
        with monkeypatch.context() as patch:
            patch.setattr(launches, "target_of", lambda index, n=num_sms: target_of(index)._replace(num_sms=n))
            launches.forget()
            found = rows_of(sequences, lengths, [1, 100, 3, 1], Layout())
        launches.forget()
        for i in range(len(lengths)):
            assert_same(found[i], wanted[i], f"sequence {i} on {num_sms} SMs")


@pytest.mark.parametrize("page_size", [0, 16])
def test_dense_queries(page_size, generator):
    """The same rows as packed ones; strides of any kind; out."""
    lengths = [SPLIT + 77, 500, 64]
    sequences = Sequences.make(lengths, 8, 2, 128, BF16, generator)
    cache = cached(sequences, lengths, Layout(page_size))
    q = torch.stack([t[n - 3 : n] for t, n in zip(sequences.q, lengths, strict=True)])
    wanted = rows_of(sequences, lengths, [3] * 3, Layout(page_size))
    wide = q.new_full((3, 8, 5, 144), math.nan).transpose(1, 2)
    wide[:, :3, :, :128] = q
    for rows in (q, wide[:, :3, :, :128]):
        memory = torch.full((3, 5, 8, 136), 7.0, dtype=BF16, device="cuda")
        out, lse = attention_with_kv_cache(rows, **cache, out=memory[:, 1:4, :, :128], return_lse=True)
        for i in range(3):
            assert_same((out[i], lse[i]), wanted[i], f"sequence {i}")
        assert (memory[:, 0] == 7).all() and (memory[:, 4] == 7).all() and (memory[..., 128:] == 7).all()


def test_rows_behind_the_last_sequence(generator):
    sequences = Sequences.make([9, 300], 8, 2, 128, BF16, generator)
    rows = packed([t[-2:] for t in sequences.q], spare=1000)
    out, lse = attention_with_kv_cache(**rows, **cached(sequences, [9, 300], Layout()), return_lse=True)
    assert (out[4:] == 0).all() and (lse[:, 4:] == -math.inf).all() and out[:4].isfinite().all()


def test_no_keys(generator):
    """Rows that see nothing, sequences without keys or queries."""
    sequences = Sequences.make([5, 5, 5], 8, 2, 128, BF16, generator)
    for layout in (Layout(), Layout(16)):
        cache = cached(sequences, [0, 2, 5], layout)
        rows = packed([sequences.q[0][:3], sequences.q[1][:4], sequences.q[2][:0]])
        out, lse = attention_with_kv_cache(**rows, **cache, return_lse=True)
        assert (out[:5] == 0).all() and (lse[:, :5] == -math.inf).all()
        assert out[5:].isfinite().all() and lse[:, 5:].isfinite().all()


# ---- new keys


@HEADS
@pytest.mark.parametrize("page_size", [0, 16, 256])
def test_new_keys(page_size, head_size, generator):
    """T7: a sequence grows by tokens and chunks behind what is cached. Its cache and rows are those of the whole."""
    length, batch = SPLIT + 40, 3
    sequences = Sequences.make([length] * batch, 8, 2, head_size, BF16, generator)
    wanted = [whole(sequences, i) for i in range(batch)]
    layout = Layout(page_size)
    cuts = [0, 5, 6, 7, 64, 500, SPLIT - 2, SPLIT - 1, SPLIT, SPLIT + 1, SPLIT + 2, length]
    cache = cached(sequences, [0] * batch, layout, room=length)
    for first, last in zip(cuts, cuts[1:], strict=False):
        cache["cache_seqlens"].fill_(first)
        q, k, v = (torch.stack([t[first:last] for t in tensors]) for tensors in (sequences.q, sequences.k, sequences.v))
        out, lse = attention_with_kv_cache(q, **cache, k=k, v=v, return_lse=True)
        for i in range(batch):
            rows = wanted[i][0][first:last], wanted[i][1][:, first:last]
            assert_same((out[i], lse[i]), rows, f"sequence {i}, {first} to {last}")
    filled = cached(sequences, [length] * batch, layout, room=length)
    assert torch.equal(bits(cache["k_cache"]), bits(filled["k_cache"]))
    assert torch.equal(bits(cache["v_cache"]), bits(filled["v_cache"]))


def test_new_keys_of_many_sequences(generator):
    """More than the grid's y has; each of a hundred has the same bits everywhere."""
    few, times = 100, 701
    q, k, v = (torch.randn(few, 1, 1, 64, generator=generator, device="cuda").to(BF16) for _ in range(3))

    def results(times: int) -> Found:
        tensors = [t.repeat(times, 1, 1, 1) for t in (q, k, v)]
        caches = [torch.zeros(few * times, 2, 1, 64, device="cuda", dtype=BF16) for _ in range(2)]
        lengths = torch.arange(few * times, device="cuda", dtype=torch.int32) % few % 2
        new = dict(zip("qkv", tensors, strict=True))
        return attention_with_kv_cache(
            **new, k_cache=caches[0], v_cache=caches[1], cache_seqlens=lengths, return_lse=True
        )

    wanted, found = results(1), results(times)
    assert wanted[0].any()
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(bits(a), bits(b).repeat(times, *[1] * (b.dim() - 1)))


def test_new_keys_of_packed_sequences(generator):
    before, new = [30, 0, 2047, 129], [1, 300, 2, 64]
    lengths = [a + b for a, b in zip(before, new, strict=True)]
    sequences = Sequences.make(lengths, 8, 2, 128, BF16, generator)
    for layout in (Layout(), Layout(32)):
        cache = cached(sequences, before, layout, room=max(lengths))
        chunks = [
            packed([t[a:] for t, a in zip(tensors, before, strict=True)], spare=3)
            for tensors in (sequences.q, sequences.k, sequences.v)
        ]
        out, lse = attention_with_kv_cache(**chunks[0], **cache, k=chunks[1]["q"], v=chunks[2]["q"], return_lse=True)
        start = 0
        for i, (a, b) in enumerate(zip(before, new, strict=True)):
            of_whole = whole(sequences, i)
            rows = out[start : start + b], lse[:, start : start + b]
            assert_same(rows, (of_whole[0][a:], of_whole[1][:, a:]), f"sequence {i}, {layout}")
            start += b
        filled = cached(sequences, lengths, layout, room=max(lengths))
        assert torch.equal(bits(cache["k_cache"]), bits(filled["k_cache"]))


@pytest.mark.slow
def test_far_pages(generator):
    """A page's number times its stride is beyond 2^31 elements."""
    pages, page_size = 2**31 // (16 * 2 * 128) + 40, 16
    sequences = Sequences.make([300], 8, 2, 128, BF16, generator)
    near = cached(sequences, [298], Layout(page_size), room=300)
    caches = [torch.empty(pages, page_size, 2, 128, dtype=BF16, device="cuda") for _ in range(2)]
    table = near["page_table"] + (pages - near["k_cache"].shape[0])
    for cache, name in zip(caches, ("k_cache", "v_cache"), strict=True):
        cache[-len(near[name]) :] = near[name]
    new = [t[0][None, 298:] for t in (sequences.q, sequences.k, sequences.v)]
    lengths = near["cache_seqlens"]
    found = attention_with_kv_cache(
        new[0], *caches, cache_seqlens=lengths, page_table=table, k=new[1], v=new[2], return_lse=True
    )
    out, lse = whole(sequences, 0)
    assert_same((found[0][0], found[1][0]), (out[298:], lse[:, 298:]), "far pages")


# ---- options


@pytest.mark.parametrize("page_size", [0, 16])
def test_windows(page_size, walk, generator):
    """T14; rows by fp64; a window whose edge lies in an earlier split."""
    lengths, queries = [2 * SPLIT + 77, SPLIT + 1, 300, 70], [1, 70, 300, 1]
    sequences = Sequences.make(lengths, 8, 2, 128, BF16, generator)
    layout = Layout(page_size)
    wanted = rows_of(sequences, lengths, queries, layout)
    for way in WAYS:
        walk(way)
        for window in ((10**6, 0), (-1, None), (2 * SPLIT + 77, 5)):
            for i, pair in enumerate(rows_of(sequences, lengths, queries, layout, window=window)):
                assert_same(pair, wanted[i], f"sequence {i}, window {window}")
        for window in ((128, 0), (SPLIT + 3, 0), (0, 0)):
            assert_rows(sequences, lengths, queries, layout, window=window)
            check_accuracy(sequences, lengths, queries, layout, window=window)
        check_accuracy(sequences, lengths, queries, layout, window=(7, 9), causal=False)


def test_a_window_is_a_row_of_less_keys(walk, generator):
    """The first visible key at a split's border: the same bits as a sequence that has no other keys."""
    length = 2 * SPLIT + 300
    sequences = Sequences.make([length], 8, 2, 128, BF16, generator)
    for way in WAYS:
        walk(way)
        found = rows_of(sequences, [length], [1], Layout(), window=(length - 1 - SPLIT, 0))
        tail = Sequences(*([t[0][SPLIT:]] for t in (sequences.q, sequences.k, sequences.v)))
        assert_same(found[0], rows_of(tail, [length - SPLIT], [1], Layout())[0], "window")


def test_softcap_and_sinks(walk, generator):
    lengths, queries = [2 * SPLIT + 77, 300, 70], [1, 100, 1]
    sequences = Sequences.make(lengths, 8, 2, 128, BF16, generator)
    layout = Layout(16)
    wanted = rows_of(sequences, lengths, queries, layout)
    nothing = torch.full((8,), -math.inf, dtype=BF16, device="cuda")
    sinks = torch.randn(8, generator=generator, device="cuda").to(BF16)
    for way in WAYS:
        walk(way)
        for i, pair in enumerate(rows_of(sequences, lengths, queries, layout, sinks=nothing)):
            assert_same(pair, wanted[i], f"sequence {i}")
        for options in ({"sinks": sinks}, {"softcap": 5.0}, {"softcap": 5.0, "sinks": sinks, "window": (1000, 0)}):
            assert_rows(sequences, lengths, queries, layout, **options)
            check_accuracy(sequences, lengths, queries, layout, **options)


def check_accuracy(sequences: Sequences, lengths: list[int], queries: list[int], layout: Layout, **options) -> None:
    """Compare rows with fp64: they are as near as rounding the weights and the result lets them be."""
    found = rows_of(sequences, lengths, queries, layout, **options)
    for i, (n, m) in enumerate(zip(lengths, queries, strict=True)):
        q, k, v = (t[i][:n].double() for t in (sequences.q, sequences.k, sequences.v))
        if "sinks" in options:
            options = {**options, "sinks": options["sinks"].double()}
        wanted, lse = reference_cache.attention_with_kv_cache(
            q[None, n - m :],
            k[None],
            v[None],
            cache_seqlens=torch.tensor([n], dtype=torch.int32, device="cuda"),
            return_lse=True,
            **options,
        )
        error, rounding = rms(found[i][0].double() - wanted[0]), rms(wanted[0].to(BF16).double() - wanted[0])
        assert error <= 3 * rounding + 1e-6, f"sequence {i}, {options}: {error} for {rounding}"
        torch.testing.assert_close(found[i][1].double(), lse[0], atol=2e-3 if "softcap" in options else 1e-5, rtol=1e-5)


@HEADS
def test_accuracy(head_size, generator):
    lengths, queries = [2 * SPLIT + 77, SPLIT, 300], [1, 5, 64]
    sequences = Sequences.make(lengths, 8, 2, head_size, BF16, generator)
    check_accuracy(sequences, lengths, queries, Layout())
    check_accuracy(sequences, lengths, queries, Layout(64), causal=False)


# ---- graphs


@pytest.mark.parametrize("way", [*WAYS, LATE])
def test_a_graph_of_other_lengths(way, walk, generator):
    """T18: work follows from lengths on the device; counters are 0 again."""
    walk(way)
    room = 3 * SPLIT
    sequences = Sequences.make([room] * 4, 8, 2, 128, BF16, generator)
    cache = cached(sequences, [room - 1] * 4, Layout(16), room=room)
    q, k, v = (torch.stack([t[-1:] for t in tensors]) for tensors in (sequences.q, sequences.k, sequences.v))
    attention_with_kv_cache(q, **cache, k=k, v=v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention_with_kv_cache(q, **cache, k=k, v=v, return_lse=True)
    for lengths in ([5, 600, 2047, 2048], [room - 1, 0, 4096, 1], [9, 9, 9, 9], [2048, 2049, 4095, room - 1]):
        cache["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        kept = [t.clone() for t in found]
        wanted = attention_with_kv_cache(q, **cache, k=k, v=v, return_lse=True)
        for i in range(4):
            assert_same((kept[0][i], kept[1][i]), (wanted[0][i], wanted[1][i]), f"sequence {i} of {lengths}")
    assert all((t == 0).all() for t in launch_decode._counters.values())


def test_compiled(generator):
    sequences = Sequences.make([300, 40], 8, 2, 128, BF16, generator)
    cache = cached(sequences, [299, 39], Layout(), room=300)
    q, k, v = (torch.stack([t[-1:] for t in tensors]) for tensors in (sequences.q, sequences.k, sequences.v))
    wanted = attention_with_kv_cache(q, **cache, k=k, v=v)
    function = torch.compile(lambda q, k, v: attention_with_kv_cache(q, **cache, k=k, v=v), fullgraph=True)
    assert torch.equal(bits(function(q, k, v)), bits(wanted))
