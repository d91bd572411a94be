"""bench_rl_step on the CPU: each provider's step runs, and ours has the same log-probabilities in both parts."""

import pytest

from bench import bench_rl_step, harness, report, whole_models
from bench.bench_rl_step import DIRECTIONS, OURS, PROVIDERS, THEIRS, TORCH, Step
from tests.bench.test_harness import ENVIRONMENT, FakeDevice
from tests.fakes import fake_gpu


@pytest.fixture(autouse=True)
def small(monkeypatch):
    pytest.importorskip("transformers", minversion="5.0")
    sizes = {"LAYERS": 1, "HIDDEN": 64, "HEADS": 2, "PAIRS": 1, "HEAD": 64, "FFN": 64, "VOCABULARY": 64}
    sizes |= {"PROMPTS": 2, "SAMPLES": 2, "PROMPT": 5, "NEW": 4}
    for name, size in sizes.items():
        monkeypatch.setattr(bench_rl_step, name, size)
    monkeypatch.setattr(bench_rl_step, "capture", lambda step: step)
    monkeypatch.setattr("cute_kernels.models.decoding.capture", lambda step: step)


def measured():
    with fake_gpu():
        return bench_rl_step.measure_step(Step(), DIRECTIONS, PROVIDERS, FakeDevice(), repetitions=4, breakdown=False)


def test_cases():
    names = [Step().case(direction).name for direction in DIRECTIONS]
    assert names == [f"rl_step.{direction}.4x5x4.bfloat16.qwen3" for direction in ("rollout", "update", "step")]


def test_a_step_is_measured_and_checked(their_modes, capsys, tmp_path):
    found = measured()
    assert [m.case.direction for m in found] == list(DIRECTIONS)
    for m in found:
        assert m.failures == {} and sorted(m.results) == sorted(PROVIDERS)
        assert m.results[OURS].error == {"differ": 0.0, "nats": 0.0}
        assert m.results[TORCH].error["nats"] < bench_rl_step.WORST
    rollout, update, step = (m.results[OURS].us for m in found)
    assert step == rollout + update
    assert their_modes == ["on", "off"] * (1 + whole_models.ROUNDS)
    bench_rl_step.print_table(found)
    assert "1.000 <= 1.15 ok" in capsys.readouterr().out
    harness.append_lines(tmp_path / "t.jsonl", [line for m in found for line in harness.lines(m, ENVIRONMENT)])
    page = report.pages(tmp_path)["performance.md"]
    assert "| rl_step step, qwen3 | 4x5x4 | **" in page and "| torch | batch_invariant_ops |" in page


def test_log_probabilities_that_differ_are_no_result(their_modes, monkeypatch):
    score = bench_rl_step.Ours.score
    monkeypatch.setattr(bench_rl_step.Ours, "score", lambda self, ids: [t + 1e-4 for t in score(self, ids)])
    for m in measured():
        assert sorted(m.results) == [THEIRS, TORCH]
        assert "differ" in m.failures[OURS]
