"""bench_training_step on the CPU: its models learn the same by every way to attend."""

import pytest
from torch.nn.attention import SDPBackend

from bench import bench_training_step, bench_transformer
from bench.bench_training_step import Step
from tests.bench.test_harness import FakeDevice


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for module in (bench_training_step, bench_transformer):
        for name, value in {"HEADS": 4, "FEED_FORWARD": 64, "VOCABULARY": 64}.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(bench_training_step, "PAIRS", 2)
    providers = {"torch": SDPBackend.MATH, "torch_flash": SDPBackend.FLASH_ATTENTION}
    monkeypatch.setattr(bench_training_step, "PROVIDERS", {**bench_training_step.PROVIDERS, **providers})


def test_cases():
    names = [step.case().name for step in bench_training_step.steps()]
    assert names == [f"training_step.fwd_bwd.8x4096x4096.bfloat16.{model}" for model in ("mhc", "llama")]


@pytest.mark.parametrize("model", ["mhc", "llama"])
def test_steps_are_measured(model):
    if model == "llama":
        pytest.importorskip("transformers")
    providers = ["cute_kernels", "batch_invariant", "torch"]
    step = Step(model, 2, 16, 64)
    (found,) = bench_training_step.measure_steps(
        step, step.directions, providers, FakeDevice(), repetitions=3, breakdown=False
    )
    assert found.failures == {} and list(found.results) == providers
    assert found.results["torch"].error["loss"] == 0.0
    assert found.results["cute_kernels"].us < found.results["torch"].us < found.copy_us


def test_a_wrong_loss_is_no_result(monkeypatch):
    monkeypatch.setattr(bench_training_step, "true_loss", lambda step, device: 1.0)
    step = Step("mhc", 1, 16, 64)
    found = bench_training_step.measure_step(step, ["torch"], FakeDevice(), repetitions=3, breakdown=False)
    assert not found.results and "wrong result: loss" in found.failures["torch"]
