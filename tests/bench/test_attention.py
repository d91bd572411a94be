"""bench_attention on the CPU: providers against its own truth, what is counted."""

import pytest

from bench import bench_attention
from bench.bench_attention import Attention
from tests.bench.test_harness import FakeDevice


def test_cases():
    names = [case.case(d).name for case in bench_attention.attentions() for d in case.directions]
    assert len(set(names)) == len(names) == 2 * 3 * 6 + 3 + 2 + 2 + 2 + 1 + 3
    quick = {case.case(d).name for case in bench_attention.attentions(quick=True) for d in case.directions}
    assert quick < set(names)


def test_what_is_counted():
    full, causal = (Attention(2, 100, 4, 2, 64, variant).case("fwd") for variant in ("full", "causal"))
    assert full.flops == 2 * causal.flops == 4 * 2 * 4 * 100 * 100 * 64
    assert full.bytes == 2 * 100 * 64 * 2 * (4 + 2 + 2 + 4)
    window = Attention(1, 300, 4, 2, 64, "window128_sinks")
    assert window.seen_keys(300) == 300 * 128 - 128 * 128 // 2 and window.seen_keys(10) == 50
    assert Attention(1, 300, 4, 2, 192, "causal", 128).case("fwd").flops == 2 * 4 * 300 * 150 * (192 + 128)


def test_packed_lengths():
    lengths = bench_attention.packed_lengths(16384)
    assert sum(lengths) == 16384 and len(lengths) > 5 and max(lengths) <= 8192


@pytest.mark.parametrize("variant", ["causal", "full", "packed", "window128_sinks"])
def test_providers_are_right(variant):
    batch, length = (1, 300) if variant == "packed" else (2, 140)
    case, providers = Attention(batch, length, 4, 2, 64, variant), ["cute_kernels", "torch"]
    (found,) = bench_attention.measure_attention(
        case, case.directions, providers, FakeDevice(), repetitions=3, breakdown=False
    )
    assert found.failures == {} and set(found.results) == set(providers)
