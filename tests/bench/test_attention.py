"""bench_attention on the CPU: providers against its own truth, what is counted."""

import pytest

from bench import bench_attention
from bench.bench_attention import Attention
from tests.bench.test_harness import FakeDevice


def test_cases():
    names = [case.case(d).name for case in bench_attention.attentions() for d in case.directions]
    assert len(set(names)) == len(names) == 2 * 2 * 6 + 3
    quick = {case.case(d).name for case in bench_attention.attentions(quick=True) for d in case.directions}
    assert quick < set(names)


def test_what_is_counted():
    full, causal = (Attention(2, 100, 4, 2, 64, variant).case("fwd") for variant in ("full", "causal"))
    assert full.flops == 2 * causal.flops == 4 * 2 * 4 * 100 * 100 * 64
    assert full.bytes == 2 * 100 * 64 * 2 * (4 + 2 + 2 + 4)


@pytest.mark.parametrize("variant", ["causal", "full"])
def test_providers_are_right(variant):
    case, providers = Attention(2, 70, 4, 2, 64, variant), ["cute_kernels", "torch"]
    (found,) = bench_attention.measure_attention(
        case, case.directions, providers, FakeDevice(), repetitions=3, breakdown=False
    )
    assert found.failures == {} and set(found.results) == set(providers)
