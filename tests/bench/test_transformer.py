"""The transformer's benchmark on the CPU: a fake device takes the place of graphs and events."""

import contextlib
import json

import pytest
import torch

from bench import bench_transformer, harness, report, saved
from bench.bench_transformer import Step
from cute_kernels.train.options import Options
from tests.bench.test_harness import ENVIRONMENT, SCHEMA, FakeDevice, rows

SMALL = (2, 16, 32)
CURVE = Options(layers=1, hidden=32, heads=2, sequence=16, batch=4, steps=10, device="cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"HEADS": 2, "FEED_FORWARD": 64, "VOCABULARY": 64}.items():
        monkeypatch.setattr(bench_transformer, name, value)


def test_names():
    names = [step.case().name for step in bench_transformer.steps()]
    assert names[0] == "step.fwd_bwd.8x4096x4096.bfloat16.n0"
    assert [name.rpartition(".")[2] for name in names[1:]] == [
        *("n4", "n4-recompute-1", "n4-recompute-optimal", "n4-offload", "n4-recompute-optimal-offload")
    ]
    assert {step.case().shape for step in bench_transformer.steps(quick=True)} == {"2x4096x4096"}


def test_flops():
    """A weight costs a multiplication and an addition a token, twice more backward; scores and values count by half."""
    weights = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 64 * 32
    assert Step(*SMALL).case().flops == 6 * 16 * weights + 3 * 2 * (2 * 2 * 16 * 16 // 2 * 32)
    assert Step(*SMALL).case().bytes == 6 * weights


def test_steps_are_measured(capsys):
    selected = [Step(*SMALL, streams=0), Step(*SMALL), Step(*SMALL, recompute=1)]
    found = bench_transformer.measure_steps(selected, FakeDevice(), repetitions=3, breakdown=True)
    assert [m.case.variant for m in found] == ["n0", "n4", "n4-recompute-1"] and not any(m.failures for m in found)
    assert [m.results["cute_kernels"].us for m in found] == [10.0, 20.0, 30.0] and found[0].copy_us == 40.0
    assert all(m.results["cute_kernels"].error["loss"] < bench_transformer.WORST_LOSS for m in found)
    (line,) = harness.lines(found[0], ENVIRONMENT)
    assert list(line) == SCHEMA and json.loads(json.dumps(line)) == line
    bench_transformer.print_steps(found)
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    assert ["n4", "0.020", "2.0000"] in [row[:3] for row in rows]


def test_a_wrong_loss_is_no_result(monkeypatch):
    monkeypatch.setattr(bench_transformer, "reference_loss", lambda step, device: torch.tensor(1.0))
    (found,) = bench_transformer.measure_steps([Step(*SMALL)], FakeDevice(), repetitions=3, breakdown=False)
    assert not found.results and "wrong result: loss" in found.failures["cute_kernels"]


def test_the_report_compares_within_a_run():
    """Each with n0 of its run, which need not be the n0 that is shown."""
    n0, n4, recompute, offload = (
        Step(*SMALL, streams=0),
        Step(*SMALL),
        Step(*SMALL, recompute=1),
        Step(*SMALL, offload=True),
    )
    lines = []
    for day, us in ((1, {n0: 10.0, n4: 12.0, offload: 20.0}), (2, {n0: 8.0, n4: 10.0}), (3, {recompute: 11.0})):
        for step, time in us.items():
            result = harness.Result(time, time, time, 1.0, 1, {"loss": 0.0}, {})
            measurement = harness.Measurement(step.case(), 1.0, {"cute_kernels": result}, {})
            lines += harness.lines(measurement, ENVIRONMENT | {"date": f"2026-01-0{day}T00:00:00Z"})
    for order in (lines, lines[::-1]):
        table = rows(report.step_table(report.SECTIONS["transformer"], saved.newest(order)))
        assert [(row[1], row[3]) for row in table[1:]] == [
            *(("n0", "1.000"), ("n4", "1.250"), ("n4-offload", "2.000"), ("n4-recompute-1", "–"))
        ]


def test_a_profiler_that_fails_leaves_the_times(monkeypatch):
    class NoProfiler(FakeDevice):
        def kernels(self, call):
            raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED")

    (found,) = bench_transformer.measure_steps([Step(*SMALL)], NoProfiler(), repetitions=3, breakdown=True)
    assert found.results["cute_kernels"].us == 10.0 and "CUPTI" in found.failures["cute_kernels"]


def test_curves(capsys):
    found, curves = bench_transformer.measure_curves("cpu", CURVE)
    assert {name: len(losses) for name, losses in curves.items()} == dict.fromkeys(
        bench_transformer.CURVE_PROVIDERS, 10
    )
    errors = {provider: result.error["distance"] for provider, result in found.results.items()}
    assert errors["cute_kernels"] == errors["torch"] == 0 and errors["torch_reordered"] < 1e-2
    bench_transformer.print_curves(found)
    assert "torch_reordered: " in capsys.readouterr().out


def test_lines_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "bench_stream", contextlib.nullcontext)
    monkeypatch.setattr(harness, "CudaDevice", lambda shuffled: FakeDevice())
    monkeypatch.setattr(harness, "environment", lambda commit: ENVIRONMENT)
    curves = bench_transformer.measure_curves
    monkeypatch.setattr(bench_transformer, "measure_curves", lambda device: curves("cpu", CURVE))
    file = tmp_path / "lines.jsonl"
    found = bench_transformer.run([Step(*SMALL)], repetitions=3, breakdown=False, outputs=[file])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(found) == 2 and [line["op"] for line in lines] == ["step", "curve", "curve", "curve"]
    assert all(len(line["losses"]) == 10 for line in lines[1:])
    assert len(bench_transformer.run([Step(*SMALL)], pattern="curve", repetitions=3)) == 1
