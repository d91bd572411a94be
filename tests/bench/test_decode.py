"""bench_decode on the CPU: providers against its own truth, what is counted."""

import re
import sys

import pytest
import torch

from bench import bench_decode
from bench.bench_decode import Append, Decode
from bench.saved import newest
from cute_kernels import attention_with_kv_cache
from tests.bench.test_harness import FakeDevice
from tests.fakes import fake_kernels


def test_cases():
    cases = bench_decode.every_case()
    names = [case.case.name for case in cases]
    assert len(set(names)) == len(names)
    assert {case.case.direction for case in cases} == {"decode", "prefill", "append"}
    assert max(case.cached_bytes for case in bench_decode.decodes()) <= 40e9
    assert {case.case.name for case in bench_decode.every_case(quick=True)} <= set(names)


def test_parts():
    """The filters that the module names take every case once."""
    parts = re.findall(r"'([^']*)'", bench_decode.__doc__.partition("Parts,")[2].partition("A case's name")[0])
    names = [case.case.name for case in bench_decode.every_case()]
    taken = [name for part in parts for name in names if re.search(part, name)]
    assert sorted(taken) == sorted(names) and len(parts) == 7


def test_what_is_counted():
    case = Decode(2, 100, 4, 2, 64).case
    assert case.bytes == 2 * (2 * 100 * 2 * 64) * 2 + 2 * 2 * 4 * 64 * 2
    assert case.flops == 4 * 2 * 100 * 4 * 64
    assert sum(Decode(8, 1600, 4, 2, 64, "ragged").lengths) < 8 * 1600


def test_chunks_have_a_place_in_tables():
    """By their keys, then by their queries."""
    cases = [Decode(1, keys, 4, 2, 64, "paged16", queries).case for keys in (200, 100) for queries in (64, 7)]
    lines = [dict(vars(case), provider="cute_kernels", date="", commit="", gpu="", us=1.0) for case in cases]
    assert [line["shape"] for line in newest(lines)] == [case.shape for case in reversed(cases)]


@pytest.mark.parametrize("variant", ["contiguous", "paged16", "paged128", "ragged"])
@pytest.mark.parametrize("queries", [1, 7])
def test_providers_are_right(queries, variant):
    if variant == "ragged" and queries > 1:
        return
    case, providers = Decode(2, 256, 4, 2, 64, variant, queries), ["cute_kernels", "torch"]
    (found,) = bench_decode.measure_decode(case, [case.case], providers, FakeDevice(), repetitions=3, breakdown=False)
    assert found.failures == {} and set(found.results) == set(providers)


@pytest.mark.parametrize("variant", ["contiguous", "paged16"])
@pytest.mark.parametrize("queries", [1, 7])
def test_append(queries, variant):
    """Ours and torch's write the same rows; peers have no such case."""
    case, providers = Append(2, 64, variant, queries), ["cute_kernels", "torch", "flash_attn_4"]
    with fake_kernels():
        (found,) = bench_decode.measure_decode(
            case, [case.case], providers, FakeDevice(), repetitions=3, breakdown=False
        )
    assert found.failures == {} and set(found.results) == {"cute_kernels", "torch"}
    assert case.case.bytes == 2 * 2 * 2 * queries * 8 * 128 * 2


def test_pages_that_flashinfer_gets(monkeypatch):
    """Its plan and its run, by a fake of it, are those of the cache."""
    for variant, queries, keys in (("paged16", 1, 64), ("ragged", 1, 64), ("contiguous", 3, 48)):
        case = Decode(2, keys, 4, 2, 64, variant, queries)
        inputs = bench_decode.make_inputs(case, "cpu")
        monkeypatch.setitem(sys.modules, "flashinfer", FakeFlashInfer)
        (found,) = bench_decode.PROVIDERS["flashinfer"](case, inputs)()
        (wanted,) = bench_decode.PROVIDERS["cute_kernels"](case, inputs)()
        torch.testing.assert_close(found, wanted, atol=1e-2, rtol=1e-2)
    assert bench_decode.PROVIDERS["flashinfer"](Decode(1, 50, 4, 2, 64), bench_decode.make_inputs(case, "cpu")) is None


class FakeFlashInfer:
    """Its two wrappers in plain torch."""

    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(self, memory, layout, **_):
            assert memory.dtype is torch.uint8 and layout == "NHD"

        def plan(self, starts, indices, last, heads, pairs, head_size, page_size, **dtypes):
            self.planned = None, starts, indices, last, page_size

        def run(self, q, cache):
            rows, starts, indices, last, page_size = self.planned
            assert indices.dtype is starts.dtype is last.dtype is torch.int32
            rows = torch.arange(len(last) + 1) if rows is None else rows
            found = []
            for i in range(len(last)):
                pages = indices[starts[i] : starts[i + 1]].long()
                length = torch.tensor([(len(pages) - 1) * page_size + last[i]], dtype=torch.int32)
                k, v = (t[pages].flatten(0, 1)[None] for t in cache)
                one = q[None, rows[i] : rows[i + 1]]
                found.append(attention_with_kv_cache(one, k, v, cache_seqlens=length)[0])
            return torch.cat(found)

    class BatchPrefillWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
        def plan(self, rows, starts, indices, last, heads, pairs, head_size, page_size, causal, **dtypes):
            assert causal
            self.planned = rows, starts, indices, last, page_size
