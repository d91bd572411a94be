"""Decode of few rows by its other configs on a GPU, scores ahead and parts of the values: the bits of the forward."""

import pytest
import torch

from cute_kernels import attention_with_kv_cache
from cute_kernels.attention.config import FEW_ROWS, DecodeConfig, DecodeSpec, ForwardSpec, decode_configs, grid_for
from cute_kernels.attention.launch import decode as launch_decode
from cute_kernels.runtime import launches
from cute_kernels.runtime.targets import target_of
from tests.attention.cache_cases import FEW_ROWS_WAYS, Layout, Sequences, cached, choose_way, rows_of
from tests.attention.cases import BF16, FP16, HEAD_SIZES, SPLIT
from tests.attention.on_gpu import HOPPER, forward_job
from tests.attention.test_kernel_cache import LENGTHS, SIZES, assert_rows, assert_same, check_accuracy
from tests.precompiled import precompile

pytestmark = HOPPER
EVERY_SIZE = [(d, d) for d in HEAD_SIZES] + SIZES
OPTIONS = ((False, None), (True, None), (False, BF16), (True, BF16))  # softcap, sinks


@pytest.fixture(scope="module", autouse=True)
def precompiled():
    from cute_kernels.attention.kernel_decode_sm90 import decode_sm90

    specs = [DecodeSpec(BF16, *size, True, rows) for size in EVERY_SIZE for rows in (0, 16)]
    specs += [DecodeSpec(FP16, 128, 128, True, 16), DecodeSpec(BF16, 128, 128, False, 16)]
    specs += [DecodeSpec(BF16, 128, 128, True, 16, *options) for options in OPTIONS[1:]]
    jobs = [
        (decode_sm90, ("sm_90a", spec, config))
        for spec in specs
        for config in decode_configs(DecodeConfig(few_rows=True), spec.head_size_v)
    ]
    precompile([*jobs, forward_job(ForwardSpec(BF16, 128, True, 128))])


@pytest.fixture(params=FEW_ROWS_WAYS)
def way(request, monkeypatch):
    choose_way(monkeypatch, request.param)
    yield request.param
    launches.forget()


@pytest.mark.parametrize("size", EVERY_SIZE, ids=str)
def test_a_row_has_the_bits_of_the_forward(size, way, generator):
    """T9: one query and two, at every kind of length; a group of 4, so at most ``FEW_ROWS`` rows."""
    d, dv = size
    split = grid_for(d, dv).split
    lengths = LENGTHS if size == (128, 128) else [1, 130, 500, split - 1, split + 1, 2 * split + 77]
    sequences = Sequences.make(lengths, 8, 2, d, BF16, generator, dv)
    for layout in (Layout(), Layout(16)):
        assert_rows(sequences, lengths, [min(n, FEW_ROWS // 4, 1 + i % 2) for i, n in enumerate(lengths)], layout)


def test_halves(way, generator):
    sequences = Sequences.make([SPLIT + 77, 300], 8, 1, 128, FP16, generator)
    assert_rows(sequences, [SPLIT + 77, 300], [1, 1], Layout(16))


def test_options(way, generator):
    """Windows, softcap and sinks."""
    lengths, layout = [2 * SPLIT + 77, 300, 70], Layout(16)
    sequences = Sequences.make(lengths, 8, 2, 128, BF16, generator)
    sinks = torch.randn(8, generator=generator, device="cuda").to(BF16)
    for options in ({"window": (SPLIT + 3, 0)}, {"window": (0, 0)}, {"sinks": sinks}, {"softcap": 5.0, "sinks": sinks}):
        assert_rows(sequences, lengths, [1, 2, 1], layout, **options)
        check_accuracy(sequences, lengths, [1, 2, 1], layout, **options)


def test_number_of_ctas(way, monkeypatch, generator):
    """T11: items of several turns; the splits and parts of a tile in any CTAs."""
    lengths = [3 * SPLIT + 77, 300, SPLIT + 1, 64, 2 * SPLIT]
    sequences = Sequences.make(lengths, 8, 2, 128, BF16, generator)
    for num_sms in (1, 7, 66):
        with monkeypatch.context() as patch:
            patch.setattr(launches, "target_of", lambda index, n=num_sms: target_of(index)._replace(num_sms=n))
            launches.forget()
            assert_rows(sequences, lengths, [1, 2, 1, 2, 1], Layout(16))
        launches.forget()


def test_a_graph_of_other_lengths(way, generator):
    """T18: counters are 0 again after each replay."""
    room = 3 * SPLIT
    sequences = Sequences.make([room] * 4, 8, 2, 128, BF16, generator)
    cache = cached(sequences, [room] * 4, Layout(16), room=room)
    q = torch.stack([t[-1:] for t in sequences.q])
    attention_with_kv_cache(q, **cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention_with_kv_cache(q, **cache, return_lse=True)
    for lengths in ([5, 600, 2047, 2048], [room, 1, 4096, 1], [9, 9, 9, 9], [2048, 2049, 4095, room]):
        cache["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        kept = [t.clone() for t in found]
        wanted = attention_with_kv_cache(q, **cache, return_lse=True)
        for i in range(4):
            assert_same((kept[0][i], kept[1][i]), (wanted[0][i], wanted[1][i]), f"sequence {i} of {lengths}")
    assert all((t == 0).all() for t in launch_decode._counters.values())


def test_many_runs(way, generator):
    """The same bits in 200 runs of more items than SMs."""
    lengths = [SPLIT * (1 + i % 3) + i for i in range(40)]
    sequences = Sequences.make(lengths, 8, 2, 128, BF16, generator)
    wanted = rows_of(sequences, lengths, [1] * 40, Layout(16))
    for _ in range(200):
        for pair, same in zip(rows_of(sequences, lengths, [1] * 40, Layout(16)), wanted, strict=True):
            assert_same(pair, same, "another run")
