"""bench_decode_step on the CPU: all models have the same logits."""

import pytest
import torch

from bench import bench_decode_step
from bench.bench_decode_step import OURS, PROVIDERS, TORCH, Step
from tests.bench.test_harness import FakeDevice
from tests.fakes import fake_gpu


@pytest.fixture(autouse=True)
def small(monkeypatch):
    pytest.importorskip("transformers", minversion="5.0")
    sizes = {"LAYERS": 2, "HIDDEN": 128, "HEADS": 2, "PAIRS": 1, "FFN": 64, "VOCABULARY": 64}
    for name, size in sizes.items():
        monkeypatch.setattr(bench_decode_step, name, size)
    monkeypatch.setattr(bench_decode_step, "BACKENDS", dict.fromkeys(bench_decode_step.BACKENDS, "eager"))


def test_cases():
    names = [step.case().name for step in bench_decode_step.steps()]
    assert names == [f"decode_step.fwd.{batch}x4096.bfloat16.llama" for batch in (1, 16, 128)]


def measure(*providers):
    with fake_gpu():
        return bench_decode_step.measure_step(Step(2, 256), providers, FakeDevice(), repetitions=3, breakdown=False)


def test_a_step_is_measured_and_checked(their_modes, monkeypatch):
    found = measure(*PROVIDERS)
    assert found.failures == {} and sorted(found.results) == sorted(PROVIDERS)
    assert 0.0 < found.results[OURS].error["logits"] < bench_decode_step.WORST
    assert their_modes[:2] == ["on", "off"] and their_modes.count("on") > 1
    monkeypatch.setattr(bench_decode_step, "WORST", 0.0)
    found = measure(OURS, TORCH)
    assert list(found.results) == [TORCH] and "wrong result: logits" in found.failures[OURS]


def test_heads_that_share_keys():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 8, generator=generator) for heads, n in ((6, 1), (1, 5), (1, 5)))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
    found, _ = bench_decode_step.attend(None, q, k, v, None, scaling=8**-0.5)
    torch.testing.assert_close(found, wanted)
