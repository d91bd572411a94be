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


@pytest.mark.exhaustive
def test_a_step_is_measured_and_checked(their_modes, monkeypatch):
    found = measure(*PROVIDERS)
    assert found.failures == {} and sorted(found.results) == sorted(PROVIDERS)
    assert 0.0 < found.results[OURS].error["logits"] < bench_decode_step.WORST
    assert their_modes[:2] == ["on", "off"] and their_modes.count("on") > 1
    monkeypatch.setattr(bench_decode_step, "WORST", 0.0)
    found = measure(OURS, TORCH)
    assert list(found.results) == [TORCH] and "wrong result: logits" in found.failures[OURS]


def test_heads_that_share_keys():
    """In groups the same; parameters are shared, attention is not."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, heads, n, 8, generator=generator) for heads, n in ((6, 1), (2, 5), (2, 5))]
    wanted, found = (
        function(None, *tensors, None, scaling=8**-0.5)[0]
        for function in (bench_decode_step.attend, bench_decode_step.attend_in_groups)
    )
    assert found.shape == (2, 1, 6, 8)
    torch.testing.assert_close(found, wanted)
    shared = bench_decode_step.Shared(Step(2, 256), "cpu")
    plain, in_groups = shared.plain[0], shared.in_groups[0]
    assert all(a is b for a, b in zip(plain.parameters(), in_groups.parameters(), strict=True))
    assert plain.config._attn_implementation == bench_decode_step.PLAIN
    assert in_groups.model.layers[0].self_attn.config._attn_implementation == bench_decode_step.IN_GROUPS
