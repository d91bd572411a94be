"""bench_attention_backward on the CPU: providers against its own truth, what is counted."""

import pytest

from bench import bench_attention, bench_attention_backward
from bench.bench_attention_backward import AttentionBackward
from tests.bench.test_harness import FakeDevice


def test_cases():
    names = [case.case(d).name for case in bench_attention_backward.backwards() for d in case.directions]
    assert len(set(names)) == len(names) == len(bench_attention.attentions())
    assert all(".bwd." in name for name in names)


def test_what_is_counted():
    full, causal = (AttentionBackward(2, 100, 4, 2, 64, variant).case("bwd") for variant in ("full", "causal"))
    assert full.flops == 2 * causal.flops == 10 * 2 * 4 * 100 * 100 * 64
    assert full.bytes == 2 * (2 * 2 * (4 + 2) * 100 * 64 * 2)


@pytest.mark.parametrize("variant", ["causal", "full"])
def test_providers_are_right(variant):
    case, providers = AttentionBackward(2, 70, 4, 2, 64, variant), ["cute_kernels", "torch"]
    (found,) = bench_attention_backward.measure_attention(
        case, case.directions, providers, FakeDevice(), repetitions=3, breakdown=False
    )
    assert found.failures == {} and set(found.results) == set(providers)
