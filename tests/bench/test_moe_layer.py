"""bench_moe_layer on the CPU: providers against its own truth, what is counted."""

import pytest

from bench import bench_moe_layer
from bench.bench_moe_layer import Step
from tests.bench.test_harness import FakeDevice


def test_cases():
    names = bench_moe_layer.forward_backward.names(bench_moe_layer.steps())
    assert len(set(names)) == len(names) == 3 * 3 * 2 + 3 * 3 * 2 + 9 + 2 * (7 + 1 + 5)
    quick = set(bench_moe_layer.forward_backward.names(bench_moe_layer.steps(quick=True)))
    assert quick < set(names)
    assert Step("permute", "qwen3-30b", 10).case("fwd").bytes == 2 * 90 * 2048


@pytest.mark.parametrize("op", ["permute", "combine", "swiglu", "route", "experts"])
def test_all_are_right(op, monkeypatch):
    monkeypatch.setattr(bench_moe_layer, "MODELS", {"tiny": (4, 2, 32, 16)})
    monkeypatch.setattr(bench_moe_layer, "ROUTERS", {"tiny": (4, 2)})
    step, providers = Step(op, "tiny", 24, "skew"), ["cute_kernels", "torch"]
    found = bench_moe_layer.measure_step(step, step.directions, providers, FakeDevice(), repetitions=3, breakdown=False)
    for measurement in found:
        assert measurement.failures == {} and set(measurement.results) == set(providers)
