"""bench_training_step on the CPU: its models learn the same by every way to attend."""

import pytest
from torch.nn.attention import SDPBackend

from bench import bench_training_step, bench_transformer
from bench.bench_training_step import Step
from bench.whole_models import THEIRS
from tests.bench.test_harness import FakeDevice


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for module in (bench_training_step, bench_transformer):
        for name, value in {"HEADS": 4, "FEED_FORWARD": 64, "VOCABULARY": 64}.items():
            monkeypatch.setattr(module, name, value)
    for name, value in {"PAIRS": 2, "EXPERTS": 4, "EXPERTS_PER_TOKEN": 2, "EXPERT_WIDTH": 32}.items():
        monkeypatch.setattr(bench_training_step, name, value)
    monkeypatch.setattr(bench_training_step, "COMPILERS", dict.fromkeys(bench_training_step.COMPILERS, "aot_eager"))
    providers = {"torch": SDPBackend.MATH, "torch_flash": SDPBackend.FLASH_ATTENTION, "torch_compile": SDPBackend.MATH}
    monkeypatch.setattr(bench_training_step, "PROVIDERS", {**bench_training_step.PROVIDERS, **providers})


def test_cases():
    names = [step.case().name for step in bench_training_step.steps()]
    wanted = [f"training_step.fwd_bwd.8x4096x4096.bfloat16.{model}" for model in ("mhc", "llama")]
    assert names == [*wanted, "training_step.fwd_bwd.4x8192x2048.bfloat16.qwen3_moe"]


@pytest.mark.parametrize("model", ["mhc", pytest.param("llama", marks=pytest.mark.exhaustive), "qwen3_moe"])
def test_steps_are_measured(model, their_modes):
    if model != "mhc":
        pytest.importorskip("transformers")
    providers = ["cute_kernels", "batch_invariant", "torch"]
    providers += {"mhc": ["torch_compile", "compiled"], "llama": ["torch_compile", "compiled"], "qwen3_moe": []}[model]
    step = Step(model, 2, 16, 64)
    (found,) = bench_training_step.measure_steps(
        step, step.directions, [*providers, THEIRS], FakeDevice(), repetitions=3, breakdown=False
    )
    assert found.failures == {} and list(found.results) == providers + [THEIRS] * (model == "llama")
    assert bool(their_modes) == (model == "llama")
    assert found.results["torch"].error["loss"] == 0.0
    assert found.results["cute_kernels"].us < found.results["torch"].us < found.copy_us


def test_a_wrong_loss_is_no_result(monkeypatch):
    monkeypatch.setattr(bench_training_step, "true_loss", lambda step, device: 1.0)
    step = Step("mhc", 1, 16, 64)
    found = bench_training_step.measure_step(step, ["torch"], FakeDevice(), repetitions=3, breakdown=False)
    assert not found.results and "wrong result: loss" in found.failures["torch"]
