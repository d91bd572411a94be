"""bench_decode_step on the CPU: the two models have the same logits."""

import pytest

from bench import bench_decode_step
from bench.bench_decode_step import Step
from tests.bench.test_harness import FakeDevice

PROVIDERS = [bench_decode_step.OURS, bench_decode_step.TORCH]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    pytest.importorskip("transformers", minversion="5.0")
    sizes = {"LAYERS": 2, "HIDDEN": 128, "HEADS": 2, "PAIRS": 1, "FFN": 64, "VOCABULARY": 64}
    for name, size in sizes.items():
        monkeypatch.setattr(bench_decode_step, name, size)


def test_cases():
    names = [step.case().name for step in bench_decode_step.steps()]
    assert names == [f"decode_step.fwd.{batch}x4096.bfloat16.llama" for batch in (1, 16, 128)]


def test_a_step_is_measured_and_checked(monkeypatch):
    def measure():
        return bench_decode_step.measure_step(Step(2, 256), PROVIDERS, FakeDevice(), repetitions=3, breakdown=False)

    found = measure()
    assert found.failures == {} and sorted(found.results) == PROVIDERS
    assert 0.0 < found.results["cute_kernels"].error["logits"] < bench_decode_step.WORST
    monkeypatch.setattr(bench_decode_step, "WORST", 0.0)
    found = measure()
    assert list(found.results) == ["torch"] and "wrong result: logits" in found.failures["cute_kernels"]
