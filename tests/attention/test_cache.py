"""Attention over a cache on the CPU: the specification, and the kernels' path with plain torch in place of kernels."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cute_kernels import UnsupportedDeviceError, attention, attention_with_kv_cache, merge_attention
from cute_kernels.attention import launch
from cute_kernels.attention.config import DecodeConfig, ForwardSpec, decode_config, prefills
from tests.attention.cache_cases import Layout, Sequences, cached, choose_way, packed, rows_of
from tests.attention.cases import BF16, FP16, SPLIT, same_bits
from tests.fakes import fake_kernels
from tests.runtime.thread_cases import first_calls

LENGTHS, QUERIES = [37, 1, 130, 64], [3, 1, 20, 1]
LAYOUTS = [Layout(), Layout(16), Layout(32, seed=3), Layout(64), Layout(128), Layout(256)]


@pytest.fixture(params=["reference", "fake kernels"])
def jobs(request):
    if request.param == "reference":
        yield []
    else:
        with fake_kernels() as jobs:
            yield jobs


def whole(sequences: Sequences, i: int, length: int, queries: int, **options):
    """(out, lse) of the last queries of the first tokens, by ``attention``."""
    q, k, v = (t[i][None, :length] for t in (sequences.q, sequences.k, sequences.v))
    out, lse = attention(q[:, length - queries :], k, v, causal=True, return_lse=True, backend="reference", **options)
    return out[0], lse[0]


def assert_close(found, wanted):
    torch.testing.assert_close(found[0].double(), wanted[0].double(), atol=2e-2, rtol=0)
    torch.testing.assert_close(found[1].double(), wanted[1].double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_are_those_of_the_whole_sequence(layout, jobs, generator):
    sequences = Sequences.make(LENGTHS, 4, 2, 64, BF16, generator)
    for options in ({}, {"window": (9, 0)}, {"softcap": 5.0, "scale": 0.3}, {"sinks": torch.ones(4)}):
        found = rows_of(sequences, LENGTHS, QUERIES, layout, **options)
        for i, (n, m) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
            assert_close(found[i], whole(sequences, i, n, m, **options))


@pytest.mark.parametrize(("d", "dv"), [(80, 80), (128, 64), (192, 128), (256, 256)])
def test_head_sizes(d, dv, jobs, generator):
    sequences = Sequences.make(LENGTHS, 4, 2, d, BF16, generator, dv)
    for layout in LAYOUTS[:2]:
        found = rows_of(sequences, LENGTHS, QUERIES, layout)
        for i, (n, m) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
            assert_close(found[i], whole(sequences, i, n, m))


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_new_keys(is_packed, layout, jobs, generator):
    """They are written behind the cached ones, and are the keys of the queries beside them."""
    sequences = Sequences.make([n + 2 for n in LENGTHS], 4, 2, 64, BF16, generator)
    cache = cached(sequences, LENGTHS, layout, room=max(LENGTHS) + 2)
    new = [
        [t[n : n + 2] for t, n in zip(tensors, LENGTHS, strict=True)]
        for tensors in (sequences.q, sequences.k, sequences.v)
    ]
    if is_packed:
        q, k, v = packed(new[0], 2), packed(new[1], 2)["q"], packed(new[2], 2)["q"]
    else:
        q, k, v = {"q": torch.stack(new[0])}, torch.stack(new[1]), torch.stack(new[2])
    out, lse = attention_with_kv_cache(**q, **cache, k=k, v=v, return_lse=True)
    if is_packed:
        assert (out[-2:] == 0).all() and (lse[:, -2:] == -math.inf).all()
        out, lse = out[:-2].view(4, 2, 4, 64), lse[:, :-2].view(4, 4, 2).transpose(0, 1)
    wanted = cached(sequences, [n + 2 for n in LENGTHS], layout, room=max(LENGTHS) + 2)
    for name in ("k_cache", "v_cache"):
        assert same_bits(cache[name], wanted[name])
    for i, n in enumerate(LENGTHS):
        assert_close((out[i], lse[i]), whole(sequences, i, n + 2, 2))


def test_what_is_asked_for(jobs, generator):
    """A mask without causality, out, fp16, no keys, no queries, values that are checked."""
    sequences = Sequences.make([9, 5], 2, 1, 64, FP16, generator)
    cache = cached(sequences, [9, 0], Layout())
    q = torch.stack([t[:4] for t in sequences.q])
    out = torch.empty_like(q)
    found = attention_with_kv_cache(q, **cache, causal=False, out=out, check=True)
    assert found is out and found.dtype is FP16 and (found[1] == 0).all()
    wanted = attention(q[:1], sequences.k[0][None], sequences.v[0][None], backend="reference")
    torch.testing.assert_close(found[:1], wanted, atol=1e-2, rtol=0)
    assert attention_with_kv_cache(q[:, :0], **cache).shape == (2, 0, 2, 64)
    causal, lse = attention_with_kv_cache(q[:, :2], **cached(sequences, [1, 1], Layout()), return_lse=True)
    assert (causal[:, 0] == 0).all() and (lse[:, :, 0] == -math.inf).all() and lse[:, :, 1].isfinite().all()


def test_what_compiles(generator):
    """Lengths, batches and windows compile nothing; layouts do."""
    sequences = Sequences.make([300, 9], 4, 2, 64, BF16, generator)
    with fake_kernels() as jobs:
        for lengths in ([300, 9], [5, 5]):
            for options in ({}, {"window": (3, 0)}, {"causal": False}):
                rows_of(sequences, lengths, [2, 1], Layout(), **options)
        assert len(set(jobs)) == 1
        rows_of(sequences, [300, 9], [2, 1], Layout(128))
        rows_of(sequences, [300, 9], [2, 1], Layout(256))
        assert len(set(jobs)) == 2


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.page_size))
def test_chunks_of_a_prompt(layout, is_packed, monkeypatch, generator):
    """By the forward's kernel the same rows; its Spec says which masks there are, and how keys lie."""
    lengths, m = [300, 140], 130
    sequences = Sequences.make(lengths, 8, 2, 64, BF16, generator)
    cache = cached(sequences, [n - m for n in lengths], layout, room=max(lengths))
    q, k, v = (
        [t[n - m : n] for t, n in zip(of, lengths, strict=True)] for of in (sequences.q, sequences.k, sequences.v)
    )
    together = torch.cat if is_packed else torch.stack
    rows = {**(packed(q) if is_packed else {"q": torch.stack(q)}), "k": together(k), "v": together(v)}
    wanted = ForwardSpec(BF16, 64, True, 64, packed_q=is_packed, used_k=True, cached=True)
    wanted = wanted._replace(page_rows=min(layout.page_size, 128))
    sinks = torch.zeros(8, dtype=BF16)
    for options, facts in (
        ({}, {}),
        ({"causal": False}, {"causal": False}),
        (
            {"window": (200, 0), "softcap": 3.0, "sinks": sinks},
            {"causal": False, "window": True, "softcap": True, "sinks": True},
        ),
    ):
        found = {}
        for way in ("parallel", "forward"):
            choose_way(monkeypatch, way)
            with fake_kernels() as jobs:
                found[way] = attention_with_kv_cache(**rows, **cache, **options, return_lse=True)
        assert jobs[-1][1][1] == wanted._replace(**facts)
        assert_close(found["forward"], found["parallel"])


def test_which_calls_are_chunks_of_a_prompt():
    """Whole tiles, of which there are enough: two thirds of the SMs' number where a sequence has many splits."""
    assert prefills(128, 512, 1, 512, 32, 16, 132) and not prefills(128, 512, 1, 512, 8, 16, 132)
    assert prefills(128, 384, 1, 384, 32, 16, 132) and not prefills(128, 256, 1, 256, 32, 16, 132)
    assert prefills(128, 384, 1, 384, 32, 1, 132) and not prefills(128, 256, 1, 256, 32, 1, 132)
    assert not prefills(128, 64, 1, 64, 128, 1, 132) and not prefills(256, 512, 1, 512, 32, 16, 132)
    assert prefills(128, 2048, 16, 2048, 32, 1, 132) and not prefills(128, 2047, 16, 1000, 32, 1, 132)


def test_many_splits_and_many_tiles(generator):
    """Workspaces of both ways to walk."""
    with fake_kernels():
        for batch, pairs, queries in ((1, 1, 1), (530, 2, 1), (270, 2, 64)):
            q = torch.zeros(batch, queries, pairs, 64, dtype=BF16)
            cache = torch.zeros(batch, SPLIT + 1, pairs, 64, dtype=BF16)
            seqlens = torch.full((batch,), 64, dtype=torch.int32)
            assert (attention_with_kv_cache(q, cache, cache, cache_seqlens=seqlens) == 0).all()
    assert decode_config(64, 64, 64, 540, 2, 132) == DecodeConfig(sequential=True)
    for sizes in ((64, 64, 64, 540, 1), (64, 9, 9, 1060, 2), (256, 64, 64, 540, 2)):
        assert decode_config(*sizes, 132) == DecodeConfig()
    assert decode_config(64, 1, 8, 1060, 2, 132) == DecodeConfig(few_rows=True)
    assert decode_config(64, 1, 8, 1, 17, 132) == DecodeConfig(few_rows=True, merges_late=True)
    assert decode_config(64, 64, 64, 540, 17, 132) == DecodeConfig(sequential=True)


def test_as_an_operator(generator):
    sequences = Sequences.make(LENGTHS, 4, 2, 64, BF16, generator)
    with fake_kernels():
        wanted = rows_of(sequences, LENGTHS, QUERIES, Layout(16))
        cache = cached(sequences, LENGTHS, Layout(16))
        rows = packed([t[n - m : n] for t, n, m in zip(sequences.q, LENGTHS, QUERIES, strict=True)])
        compiled = torch.compile(
            lambda q: attention_with_kv_cache(q, **{k: v for k, v in rows.items() if k != "q"}, **cache),
            backend="aot_eager",
            fullgraph=True,
        )
        assert same_bits(compiled(rows["q"]), torch.cat([out for out, _ in wanted]))
        q = torch.zeros(1, 1, 2, 64, dtype=BF16)
        arguments = (
            q,
            q,
            q,
            torch.ones(1, dtype=torch.int32),
            None,
            None,
            None,
            q.clone(),
            q.new_zeros(1, 2, 1).float(),
        )
        torch.library.opcheck(
            launch.attention_decode.registered,
            (*arguments, 1, 1, False, 5, 0, 0.0, 0.125),
            test_utils=("test_schema", "test_faketensor"),
        )
        torch.library.opcheck(
            launch.attention_append.registered,
            (q, q.clone(), q.clone(), q.clone(), torch.zeros(1, dtype=torch.int32), None, None, 1),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_flops(generator):
    """Queries with as many keys as the longest sequence may have, as torch counts all keys of its own."""
    sequences = Sequences.make([30, 20], 4, 2, 64, BF16, generator)
    cache, q = cached(sequences, [30, 20], Layout(16)), torch.stack([t[-1:] for t in sequences.q])
    with fake_kernels(), FlopCounterMode(display=False) as counter:
        attention_with_kv_cache(q, **cache, max_seqlen_k=32)
    assert counter.get_total_flops() == 2 * 2 * 1 * 4 * 32 * (64 + 64)


def test_a_gpu_without_kernels(generator):
    with fake_kernels("sm_100a"):
        sequences = Sequences.make([3], 2, 1, 64, BF16, generator)
        with pytest.raises(UnsupportedDeviceError, match="attention_with_kv_cache: has kernels for compute"):
            rows_of(sequences, [3], [1], Layout())
        tensors = cached(sequences, [3], Layout())
        before, new = tensors["k_cache"].clone(), torch.ones(1, 1, 1, 64, dtype=BF16)
        with pytest.raises(UnsupportedDeviceError, match="attention_with_kv_cache: has kernels for compute"):
            attention_with_kv_cache(new.expand(1, 1, 2, 64).contiguous(), **tensors, k=new, v=new)
        assert same_bits(tensors["k_cache"], before)


def test_threads_that_make_the_first_call_together(generator):
    sequences = Sequences.make([30, 20], 4, 2, 64, BF16, generator)
    cache = cached(sequences, [30, 20], Layout(16))
    names, q = list(cache), torch.stack([t[-1:] for t in sequences.q])

    def call(q, *tensors):
        return attention_with_kv_cache(q, **dict(zip(names, tensors, strict=True)))

    with fake_kernels():
        first_calls((call, (q, *cache.values())), False)


# ---- partial results


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64], ids=str)
def test_merge(dtype, generator):
    q, k, v = (torch.randn(2, n, 4, 64, generator=generator, dtype=torch.float64).to(dtype) for n in (5, 30, 30))
    cuts = [slice(0, 7), slice(7, 7), slice(7, 29), slice(29, 30)]
    parts = [attention(q, k[:, cut], v[:, cut], return_lse=True, backend="reference") for cut in cuts]
    out, lse = merge_attention(*zip(*parts, strict=True))
    wanted, of_rows = attention(q, k, v, return_lse=True, backend="reference")
    tolerance = {"atol": 2e-2 if dtype is BF16 else 1e-5, "rtol": 0}
    assert out.dtype is dtype and lse.dtype is of_rows.dtype
    torch.testing.assert_close(out, wanted, **tolerance)
    torch.testing.assert_close(lse, of_rows, atol=1e-5, rtol=1e-5)
    packed_out, packed_lse = merge_attention([o[0] for o, _ in parts], [of[0] for _, of in parts])
    assert same_bits(packed_out.float(), out[0].float()) and same_bits(packed_lse.float(), lse[0].float())
    nothing, of_nothing = merge_attention([parts[1][0]] * 2, [parts[1][1]] * 2)
    assert (nothing == 0).all() and (of_nothing == -math.inf).all()


def test_sizes_have_launches():
    """A launch is found once for a call's sizes; keys count by splits, each of which has a place in the workspace."""
    q, cache = torch.zeros(2, 1, 4, 64, dtype=BF16), torch.zeros(2, 3 * SPLIT, 2, 64, dtype=BF16)
    lengths = torch.tensor([9, 5], dtype=torch.int32)
    with fake_kernels(computes=False) as jobs:
        for most, found in ((10, 1), (SPLIT, 1), (SPLIT + 1, 2), (10, 2), (3 * SPLIT, 3), (2 * SPLIT, 3)):
            attention_with_kv_cache(q, cache, cache, cache_seqlens=lengths, max_seqlen_k=most)
            assert len(jobs) == found
        attention_with_kv_cache(q[:1], cache[:1], cache[:1], cache_seqlens=lengths[:1], max_seqlen_k=10)
        assert len(jobs) == 4 and len(set(jobs)) == 1
