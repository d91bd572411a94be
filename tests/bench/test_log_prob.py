"""bench_log_prob on the CPU: all providers against its own truth, what is counted, how it is shown."""

import contextlib

import pytest
import torch

from bench import bench_log_prob, harness, report, saved
from bench.bench_log_prob import COMPILED, FLOOR, OURS, TORCH, LogProb
from tests.bench.test_harness import ENVIRONMENT, FakeDevice, rows

SIZE = LogProb(40, 130, 64)


def test_cases():
    names = [case.name for size in bench_log_prob.log_probs() for case in size.cases]
    assert len(set(names)) == len(names) == 2 * 3 + 3 + 6 + 5
    forward, backward = SIZE.cases
    assert backward.flops == 3 * forward.flops == 6 * 40 * 130 * 64
    (step,) = LogProb(40, 130, 64, "loss").cases
    assert step.direction == "step" and step.flops == 4 * forward.flops
    (step,) = LogProb(40, 130, 64, bench_log_prob.KEEPS).cases
    assert step.direction == "step" and step.flops == 3 * forward.flops
    assert forward.bytes == 2 * 64 * 170 + 8 * 40


def test_truth_some_tokens_at_a_time(monkeypatch):
    """The gradients written out are autograd's, whatever the parts."""
    inputs = bench_log_prob.make_inputs(SIZE, "cpu")
    monkeypatch.setattr(bench_log_prob, "ROWS", 16)
    exact = bench_log_prob.truth(inputs)
    x, weight = (t.detach().double().requires_grad_() for t in (inputs.x, inputs.weight))
    log_p = torch.log_softmax(x @ weight.t(), -1)
    log_prob, entropy = log_p.gather(1, inputs.target[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)
    dx, dw = torch.autograd.grad((log_prob, entropy), (x, weight), (inputs.g.double(), inputs.h.double()))
    for found, wanted in zip(
        (*exact["fwd"].values(), *exact["bwd"].values()), (log_prob, entropy, dx, dw), strict=True
    ):
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)


def test_all_providers_are_right(capsys):
    providers = [OURS, TORCH, FLOOR]
    found = bench_log_prob.measure_log_prob(
        SIZE, ["fwd", "bwd"], providers, FakeDevice(), repetitions=3, breakdown=False
    )
    assert [m.case.direction for m in found] == ["fwd", "bwd"]
    for m in found:
        assert m.failures == {} and set(m.results) == set(providers)
        assert m.results[FLOOR].error == {} and len(m.results[OURS].error) == 2
    bench_log_prob.print_table(found)
    shown = capsys.readouterr().out
    assert "3.000  0.90 ok" in shown
    lines = [line for m in found for line in harness.lines(m, ENVIRONMENT)]
    table = rows(report.speed_table(report.SECTIONS["log_prob"], lines))
    assert table[0][3:] == ["torch", "bare products", "peak, ours, MiB", "peak, torch, MiB"]
    assert table[1] == ["linear_log_prob fwd, train", "40x130x64", "**10.0**", "2.00", "3.00", "0", "0"]


@pytest.mark.parametrize("variant", ["loss", bench_log_prob.KEEPS])
def test_a_step_of_a_loss(variant):
    """Ours and torch's are right, and the bare products are not looked at."""
    size, providers = LogProb(40, 130, 64, variant), [OURS, TORCH, FLOOR]
    (m,) = bench_log_prob.measure_log_prob(size, ["step"], providers, FakeDevice(), repetitions=3, breakdown=False)
    assert m.failures == {} and set(m.results) == set(providers)
    assert set(m.results[OURS].error) == {"loss", "dx", "dw"}


def test_a_wrong_result_is_a_failure(monkeypatch):
    real = bench_log_prob.cute_kernels.linear_log_prob
    monkeypatch.setattr(
        bench_log_prob.cute_kernels, "linear_log_prob", lambda x, w, t: tuple(1.1 * r for r in real(x, w, t))
    )
    for m in bench_log_prob.measure_log_prob(
        SIZE, ["fwd", "bwd"], [OURS, TORCH], FakeDevice(), repetitions=3, breakdown=False
    ):
        assert m.failures[OURS].startswith("wrong result") and OURS not in m.results


def test_the_compiled_peer_is_the_same_function():
    inputs = bench_log_prob.make_inputs(SIZE, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: function)
        assert bench_log_prob.FUNCTIONS[COMPILED]() is bench_log_prob.with_logits
        assert bench_log_prob.LOSSES[COMPILED]() is bench_log_prob.loss_with_logits
    assert len(bench_log_prob.calls(TORCH, inputs, "bwd", "train")()) == 2


def test_run_writes(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "bench_stream", contextlib.nullcontext)
    monkeypatch.setattr(harness, "CudaDevice", lambda **options: FakeDevice())
    monkeypatch.setattr(harness, "environment", lambda commit: {**ENVIRONMENT, "commit": commit})
    path = tmp_path / "one.jsonl"
    bench_log_prob.run([SIZE], [OURS], pattern="fwd", commit="abc", outputs=[path])
    assert {(line["family"], line["direction"], line["provider"]) for line in saved.read_lines(path)} == {
        ("log_prob", "fwd", OURS),
        ("log_prob", "fwd", TORCH),
    }
