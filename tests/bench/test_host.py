"""bench_host on the CPU, without its kernel."""

import contextlib
import dataclasses

import pytest
import torch

from bench import bench_host, harness, report, saved
from tests.bench.test_harness import ENVIRONMENT, FakeDevice
from tests.bench.test_harness import rows as table_rows


@pytest.fixture
def launches(monkeypatch):
    """The arguments that the empty kernel was launched with."""
    calls = []
    monkeypatch.setattr(bench_host, "arch_of", lambda index: "sm_90a")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("bench.empty_kernel.empty", lambda arch, op, keeps_statistics: lambda *args: calls.append(args))
    return calls


def test_cases():
    cases = [host.case for host in bench_host.host_cases()]
    assert len({case.name for case in cases}) == len(cases) == 12
    assert {case.variant for case in cases} == set(bench_host.GOALS)


@pytest.mark.parametrize("host", bench_host.host_cases(), ids=lambda host: f"{host.op}-{host.variant}")
def test_measured_beside_torch_and_the_floor(host, launches, capsys):
    providers = list(bench_host.PROVIDERS)
    found = bench_host.measure_host(host, providers, FakeDevice(), repetitions=3, breakdown=False)
    assert found.failures == {} and set(found.results) == set(providers)
    x, weight, bias, y, statistics, *_ = launches[0]
    training = host.variant == "training"
    has_third = host.op in ("layer_norm", "grouped_mm", "attention")
    assert x.requires_grad == training and (bias is not None) == has_third
    columns = x.shape[1:] if host.op != "grouped_mm" else weight.shape[2:]
    assert y.shape == (*x.shape[:1], *columns) and y is not x
    rows = {"rms_norm": 1, "layer_norm": 2}.get(host.op, 0) if training else 0
    rows = bench_host.HEADS if host.op == "attention" else rows
    assert (statistics.shape == (rows, bench_host.ROWS)) if rows else statistics is None
    bench_host.print_table([found])
    line, goal = capsys.readouterr().out.splitlines()[1].split(), f"{bench_host.GOALS[host.variant]:.2f}"
    assert line[:7] == [host.op, host.variant, "3.0", "3.0", "3.0", "1.00", goal]
    text = report.host_table(report.SECTIONS["host"], harness.lines(found, ENVIRONMENT))
    times = ["3.0"] * 3 + ["–"] * 3 if host.variant == "inference" else ["–"] * 3 + ["3.0"] * 3
    assert table_rows(text)[1:] == [[host.op, host.case.shape, *times]]


@pytest.mark.parametrize("guide", [bench_host.FLOOR, bench_host.TORCH])
def test_the_round_that_counts(guide, monkeypatch):
    """That of the least floor, not of our least; without a floor, torch's."""
    host, providers = bench_host.host_cases()[0], [bench_host.OURS, bench_host.TORCH]
    if guide == bench_host.FLOOR:
        providers.append(bench_host.FLOOR)
    found = bench_host.measure_host(host, providers[:2], FakeDevice(), repetitions=3, breakdown=False)
    times = [
        {bench_host.OURS: 9.0 + i, guide: 7.0 - i % 3, bench_host.TORCH: 10.0 - i % 3} for i in range(bench_host.ROUNDS)
    ]
    one = next(iter(found.results.values()))
    rounds = iter([{name: dataclasses.replace(one, host_us=us) for name, us in row.items()} for row in times])
    monkeypatch.setattr(harness, "measure", lambda *args, **options: dataclasses.replace(found, results=next(rounds)))
    chosen = bench_host.measure_host(host, providers, FakeDevice(), repetitions=3, breakdown=False)
    assert chosen.results[bench_host.OURS].host_us == 11.0


def test_the_floor_of_training_saves_what_a_backward_needs(launches):
    host = bench_host.HostCase("layer_norm", "training")
    inputs = bench_host.make_inputs(host, "cpu")
    y = bench_host.floor(host, inputs[0])(*inputs)
    saved = y.grad_fn.saved_tensors
    assert [t.shape for t in saved] == [*(t.shape for t in inputs), (2, bench_host.ROWS)]


def test_run_writes_and_stops(launches, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(harness, "bench_stream", contextlib.nullcontext)
    monkeypatch.setattr(harness, "CudaDevice", lambda **options: FakeDevice())
    monkeypatch.setattr(harness, "environment", lambda commit: {**ENVIRONMENT, "commit": commit})
    path = tmp_path / "one.jsonl"
    providers = [bench_host.OURS, bench_host.FLOOR]
    bench_host.run(bench_host.host_cases(), providers, pattern="linear.*inference", commit="abc", outputs=[path])
    lines = saved.read_lines(path)
    assert {(line["family"], line["op"], line["commit"]) for line in lines} == {("host", "linear", "abc")}
    assert {line["provider"] for line in lines} == set(bench_host.PROVIDERS)
    assert bench_host.run(bench_host.host_cases(), providers, time_limit=0.0) == []
    assert "time limit: 12 of 12 cases left, from rms_norm.fwd" in capsys.readouterr().out
