"""T18 on a GPU: the same bits beside kernels that come and go on the SMs, on a second stream, on a second device."""

import pytest
import torch

from cute_kernels import attention, attention_with_kv_cache
from cute_kernels.attention.config import DecodeConfig, DecodeSpec, ForwardSpec, prefill_spec
from cute_kernels.runtime import launches
from tests.attention.cache_cases import LATE, WAYS, Layout, Sequences, cached, choose_way, packed
from tests.attention.cases import BF16, SPLIT, Case, make_inputs, make_packed
from tests.attention.occupy import beside_other_work, occupy
from tests.attention.on_gpu import HOPPER, assert_same, forward_job, run
from tests.precompiled import precompile

pytestmark = HOPPER
SIZES = pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (256, 256)], ids=str)  # the last one has a workspace
LENGTHS, QUERIES = [3 * SPLIT + 5, 100, SPLIT + 1, 2 * SPLIT], [1, 2, 130, 1]
DECODE = DecodeSpec(BF16, 128, 128, True, 16)


@pytest.fixture(scope="module", autouse=True)
def precompiled():
    from cute_kernels.attention.kernel_decode_sm90 import decode_sm90

    packing = {"packed_q": True, "packed_k": True}
    specs = [ForwardSpec(BF16, d, True, d, **more) for d in (64, 128, 256) for more in ({}, packing)]
    jobs = [forward_job(spec) for spec in (*specs, prefill_spec(DECODE))]
    configs = DecodeConfig(), DecodeConfig(sequential=True), DecodeConfig(merges_late=True)
    jobs += [(decode_sm90, ("sm_90a", DECODE, config)) for config in configs]
    precompile([*jobs, (occupy, ("sm_90a",))])


@SIZES
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_forward(is_packed, sizes, generator):
    """More tiles than SMs, some of two splits."""
    case, places = Case(2, 2 * SPLIT + 500, 2 * SPLIT + 500, 8, 2, sizes[0]), {}
    inputs = make_inputs(case, generator)
    if is_packed:
        inputs, places = make_packed(
            case, (2 * SPLIT + 77, 300, SPLIT + 1), (2 * SPLIT + 77, 300, SPLIT + 1), generator
        )
    wanted = run(inputs, True, **places)
    for found in beside_other_work(lambda i: run(inputs, True, **places)):
        assert_same(found, wanted)


@pytest.mark.parametrize("way", [*WAYS, LATE])
def test_over_a_cache(way, monkeypatch, generator):
    """Splits of a row are merged by the CTA that ends last, whichever it is, or by any."""
    sequences = Sequences.make(LENGTHS, 8, 2, 128, BF16, generator)
    rows = packed([t[-m:] for t, m in zip(sequences.q, QUERIES, strict=True)])
    cache = cached(sequences, LENGTHS, Layout(16))
    choose_way(monkeypatch, way)
    wanted = attention_with_kv_cache(**rows, **cache, return_lse=True)
    for found in beside_other_work(lambda i: attention_with_kv_cache(**rows, **cache, return_lse=True)):
        assert_same(found, wanted)
    launches.forget()


def test_two_streams_at_once(generator):
    """Each has partials and counters of its own."""
    sequences = Sequences.make(LENGTHS, 8, 2, 128, BF16, generator)
    cache = cached(sequences, LENGTHS, Layout(16))
    rows = packed([t[-1:] for t in sequences.q])
    wanted = attention_with_kv_cache(**rows, **cache, return_lse=True)
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for i in range(200):
        with torch.cuda.stream(streams[i % 2]):
            results.append(attention_with_kv_cache(**rows, **cache, return_lse=True))
    torch.cuda.synchronize()
    for found in results:
        assert_same(found, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_device(generator):
    inputs = make_inputs(Case(2, SPLIT + 300, SPLIT + 300, 8, 2, 128), generator)
    sequences = Sequences.make(LENGTHS, 8, 2, 128, BF16, generator)
    rows, cache = packed([t[-1:] for t in sequences.q]), cached(sequences, LENGTHS, Layout(16))

    def on(device: str) -> tuple[torch.Tensor, ...]:
        tensors = [t.to(device) for t in inputs]
        arguments = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in (rows | cache).items()}
        found = attention(*tensors, causal=True, return_lse=True)
        found += attention_with_kv_cache(**arguments, return_lse=True)
        return tuple(t.to("cuda:0") for t in found)

    first, second = on("cuda:0"), on("cuda:1")
    assert_same(second[:2], first[:2])
    assert_same(second[2:], first[2:])
