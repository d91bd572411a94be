"""The benchmark's logic on the CPU: a fake device takes the place of graphs and events."""

import contextlib
import dataclasses
import functools
import importlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from bench import bench_norm, figures, forward_backward, harness, report, saved
from bench.bench_norm import Norm

ROOT = Path(__file__).resolve().parents[2]
CASE = harness.Case("norm", "rms_norm", "fwd", "4x8", "bfloat16", "plain", bytes=128, flops=1, goal=0.9)
ENVIRONMENT = {
    "date": "2026-01-01T00:00:00Z",
    "commit": "c1",
    "gpu": "NVIDIA T",
    "driver": "1",
    "torch": "2",
    "dsl": "4",
}
SCHEMA = [
    *("date", "commit", "gpu", "driver", "torch", "dsl"),
    *("family", "op", "direction", "shape", "dtype", "variant", "provider"),
    *("us", "us_min", "us_max", "bytes", "flops", "copy_us", "host_us", "kernels", "launches"),
    *("error", "peak_bytes"),
]


class FakeDevice:
    """Runs calls on the CPU; the times are 10, 20, ... us in the order of the calls, the copy last."""

    name = "cpu"

    def warm_up(self, call: harness.Call) -> None:
        call()

    def capture(self, call: harness.Call) -> harness.Captured:
        outputs = tuple(output.detach().clone() for output in call())

        def replay() -> None:
            for output, result in zip(outputs, call(), strict=True):
                output.copy_(result.detach())

        return harness.Captured(call, replay, outputs)

    def copy(self, num_bytes: int) -> harness.Captured:
        return harness.Captured(tuple, lambda: None, ())

    def time_us(self, calls: Sequence[harness.Captured], repetitions: int) -> list[list[float]]:
        return [[10.0 * index + spread for spread in (1, 0, -1)] for index in range(1, len(calls) + 1)]

    def host_us(self, calls: Sequence[harness.Call]) -> list[float]:
        return [3.0] * len(calls)

    def peak_bytes(self, call: harness.Call) -> int:
        return 64

    def kernels(self, call: harness.Call) -> tuple[dict[str, float], int]:
        return {"kernel": 9.0}, 1

    def synchronize(self) -> None:
        pass


PROFILES = [
    (path.relative_to(ROOT).as_posix(), line)
    for path in sorted((ROOT / "cute_kernels").rglob("*.py"))
    for line in path.read_text().splitlines()
    if line.startswith("Profile: ncu")
]


@pytest.mark.parametrize("line", [line for _, line in PROFILES], ids=[path for path, _ in PROFILES])
def test_the_case_of_a_profile_exists(line, capsys):
    """The command in a kernel's docstring finds a case."""
    words = line.split()
    module, pattern = words[words.index("-m") + 1], words[words.index("--filter") + 1]
    importlib.import_module(module).main(["--list", "--filter", pattern])
    assert any(re.search(pattern, name) for name in capsys.readouterr().out.splitlines())


def returns(*outputs: Tensor):
    """A provider's maker whose call returns these tensors."""
    return lambda: lambda: outputs


@pytest.fixture
def exact() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_measure_reports_median_and_error(exact):
    rounded = exact.bfloat16()
    makers = {"cute_kernels": returns(rounded), "torch": returns(rounded)}
    measurement = harness.measure(CASE, makers, {"y": exact}, FakeDevice())
    assert measurement.failures == {}
    assert measurement.copy_us == 30.0
    ours = measurement.results["cute_kernels"]
    assert (ours.us, ours.us_min, ours.us_max, ours.host_us, ours.peak_bytes) == (10.0, 9.0, 11.0, 3.0, 64)
    assert ours.error == {"y": harness.relative_rms(rounded, exact)}
    assert (ours.kernels, ours.launches) == ({"kernel": 9.0}, 1)
    assert 1e-3 < ours.error["y"] < 3e-3


@pytest.mark.parametrize(
    "damage",
    [
        lambda y: y * 1.01,
        lambda y: y.clone().index_fill_(0, torch.tensor([1]), float("nan")),
        lambda y: y[:2],
    ],
    ids=["one percent off", "NaN", "shape"],
)
def test_wrong_result_is_refused(exact, damage):
    rounded = exact.bfloat16()
    makers = {"torch": returns(rounded), "cute_kernels": returns(damage(rounded))}
    measurement = harness.measure(CASE, makers, {"y": exact}, FakeDevice())
    assert "wrong result: y" in measurement.failures["cute_kernels"]
    assert [line["provider"] for line in harness.lines(measurement, ENVIRONMENT)] == ["torch"]


def test_missing_output_is_refused(exact):
    rounded = exact.bfloat16()
    makers = {"torch": returns(rounded, rounded), "cute_kernels": returns(rounded)}
    measurement = harness.measure(CASE, makers, {"y": exact, "sum": exact}, FakeDevice())
    assert "wrong result" in measurement.failures["cute_kernels"]


def test_output_that_the_replay_does_not_write_is_refused(exact):
    """Work captured only in part (launched on another stream, say) leaves the NaN that is put there first."""

    class CapturesOnlyTorch(FakeDevice):
        def capture(self, call):
            captured = super().capture(call)
            return captured if call is torch_call else dataclasses.replace(captured, replay=lambda: None)

    rounded = exact.bfloat16()
    torch_call = returns(rounded)()
    makers = {"torch": lambda: torch_call, "cute_kernels": returns(rounded)}
    measurement = harness.measure(CASE, makers, {"y": exact}, CapturesOnlyTorch())
    assert list(measurement.results) == ["torch"]
    assert "wrong result" in measurement.failures["cute_kernels"]


def test_failing_provider_does_not_stop_the_others(exact):
    rounded = exact.bfloat16()

    def fails():
        raise RuntimeError("no kernel for this size\nand a long trace")

    makers = {"quack": fails, "torch": returns(rounded), "liger": lambda: fails, "cute_kernels": returns(rounded)}
    measurement = harness.measure(CASE, makers, {"y": exact}, FakeDevice())
    assert list(measurement.results) == ["torch", "cute_kernels"]
    assert measurement.failures == dict.fromkeys(["quack", "liger"], "RuntimeError: no kernel for this size")
    assert measurement.copy_us == 30.0


def test_an_output_of_integers_does_not_stop_the_others(exact):
    rounded = exact.bfloat16()
    makers = {"quack": returns(rounded.int()), "torch": returns(rounded), "cute_kernels": returns(rounded)}
    measurement = harness.measure(CASE, makers, {"y": exact}, FakeDevice())
    assert list(measurement.results) == ["torch", "cute_kernels"]
    assert list(measurement.failures) == ["quack"]
    makers = {"torch": returns(rounded.int()), "cute_kernels": returns(rounded)}
    measurement = harness.measure(CASE, makers, {"y": exact}, FakeDevice())
    assert measurement.results == {} and list(measurement.failures) == ["torch", "cute_kernels"]


def test_without_the_yardstick_its_error_is_told(exact):
    def fails():
        raise torch.OutOfMemoryError("no memory")

    makers = {"torch": fails, "cute_kernels": returns(exact.bfloat16()), "quack": lambda: None}
    measurement = harness.measure(CASE, makers, {"y": exact}, FakeDevice())
    assert measurement.results == {}
    assert measurement.failures == {
        "torch": "OutOfMemoryError: no memory",
        "cute_kernels": "no torch to compare it with",
    }


def test_a_profiler_that_fails_leaves_the_times(exact):
    class NoProfiler(FakeDevice):
        def kernels(self, call):
            raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED")

    measurement = harness.measure(CASE, {"torch": returns(exact.float())}, {"y": exact}, NoProfiler())
    found = measurement.results["torch"]
    assert (found.us, found.kernels, found.launches) == (10.0, {}, 0)
    assert measurement.failures == {"torch": "its kernels: RuntimeError: CUPTI_ERROR_NOT_INITIALIZED"}


def test_lines_have_the_schema(exact):
    measurement = harness.measure(CASE, {"torch": returns(exact.float())}, {"y": exact}, FakeDevice())
    (line,) = harness.lines(measurement, ENVIRONMENT)
    assert list(line) == SCHEMA
    assert json.loads(json.dumps(line)) == line


def test_append_lines(tmp_path):
    path = tmp_path / "results" / "gpu.jsonl"
    harness.append_lines(path, [{"us": 1.0}])
    harness.append_lines(path, [{"us": 2.0}])
    assert [line["us"] for line in saved.read_lines(path)] == [1.0, 2.0]


def test_results_path():
    assert harness.results_path("NVIDIA H200").name == "h200.jsonl"
    assert harness.results_path("NVIDIA H100 80GB HBM3").name == "h100-80gb-hbm3.jsonl"


def test_a_profile_that_found_nothing_is_made_again(monkeypatch):
    """The mean over the calls of one profile, the first that has kernels; one that is launched twice counts twice."""

    def event(key, count):
        device = torch.autograd.DeviceType.CUDA
        return SimpleNamespace(key=key, count=count, device_type=device, self_device_time_total=50.0)

    long = 100 * "k"
    profiles = [[], [event("kernel", 10), event(long + "a", 5), event(long + "b", 5)], [event("kernel", 5)]]

    def profile(activities):
        return contextlib.nullcontext(SimpleNamespace(key_averages=functools.partial(profiles.pop, 0)))

    monkeypatch.setenv("TEARDOWN_CUPTI", "0")
    monkeypatch.setattr(torch.profiler, "profile", profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = []
    device = harness.CudaDevice.__new__(harness.CudaDevice)
    assert device.kernels(lambda: calls.append(1)) == ({long: 20.0, "kernel": 10.0}, 4)
    assert len(calls) == 10
    profiles[:] = [[]] * 9
    assert device.kernels(lambda: None) == ({}, 0)


def test_seed_depends_on_the_name_only():
    assert harness.seed("rms_norm.8192x4096") == 2389648171405175141
    assert harness.seed("rms_norm.8192x4097") != harness.seed("rms_norm.8192x4096")


def test_commit_without_git(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "REPOSITORY", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("COMMIT", raising=False)
    assert harness.current_commit() == "unknown"
    monkeypatch.setenv("COMMIT", "abc")
    assert harness.current_commit() == "abc"


def test_table(exact, capsys):
    rounded = exact.bfloat16()
    makers = {"cute_kernels": returns(rounded), "torch": returns(rounded), "quack": lambda: exact.no_such_method}
    harness.print_table([harness.measure(CASE, makers, {"y": exact}, FakeDevice())])
    head, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[:4] == ["op", "dir", "shape", "variant"]
    assert row[:9] == ["rms_norm", "fwd", "4x8", "plain", "10.0", "30.0", "3.000", "0.90", "ok"]
    assert row[9:12] == ["20.0", "failed", "2.00"]


# bench_norm


def test_cases_are_those_of_the_specification():
    cases = [norm.case(direction) for norm in bench_norm.norms() for direction in norm.directions]
    assert len({case.name for case in cases}) == len(cases)
    for op in bench_norm.OPS:
        for direction, goals in (("fwd", (0.97, 0.95, 0.92)), ("bwd", (0.90, 0.82, 0.75))):
            its = [case for case in cases if (case.op, case.direction) == (op, direction)]
            odd, others = ([case.goal for case in its if (case.variant == "odd") == wanted] for wanted in (True, False))
            assert [goal for goal in others if goal is not None] == [goal for goal in goals for _ in range(5)]
            assert set(odd) == {0.85}
            shapes = {case.shape for case in its}
            assert {"1000000x64", "1000000x128", "43633x769", "256x131072"} <= shapes


def test_minimal_bytes():
    def num_bytes(op, direction, variant="plain", dtype=torch.bfloat16):
        return bench_norm.minimal_bytes(Norm(op, 1024, 512, dtype, variant), direction)

    stream, row, column = 1024 * 512 * 2, 1024 * 4, 512 * 2
    assert num_bytes("rms_norm", "fwd") == 2 * stream + row + column
    assert num_bytes("rms_norm", "bwd") == 3 * stream + row + 2 * column
    assert num_bytes("layer_norm", "fwd") == 2 * stream + 2 * row + 2 * column
    assert num_bytes("layer_norm", "bwd") == 3 * stream + 2 * row + 3 * column
    assert num_bytes("layer_norm", "bwd", "save_output") == 3 * stream + row + 4 * column
    assert num_bytes("rms_norm", "bwd", "save_output") == num_bytes("rms_norm", "bwd")
    assert num_bytes("rms_norm", "fwd", "residual") == 4 * stream + row + column
    assert num_bytes("rms_norm", "bwd", "residual") == 4 * stream + row + 2 * column
    assert num_bytes("rms_norm", "fwd", "inference") == 2 * stream + column
    assert num_bytes("rms_norm", "fwd", dtype=torch.float32) == 4 * stream + row + 2 * column
    assert bench_norm.minimal_bytes(Norm("rms_norm", 8192, 4096), "bwd") == pytest.approx(201.4e6, rel=1e-3)


def test_inputs_depend_on_the_case_only():
    norm = Norm("layer_norm", 8, 16)
    first, second = bench_norm.make_inputs(norm, "cpu"), bench_norm.make_inputs(norm, "cpu")
    assert list(first.tensors) == ["x", "weight", "bias"]
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, second.tensors[name]) and tensor.requires_grad
    assert not torch.equal(first.tensors["x"], bench_norm.make_inputs(Norm("rms_norm", 8, 16), "cpu").tensors["x"])


@pytest.mark.parametrize("op", bench_norm.OPS)
@pytest.mark.parametrize(
    "variant, dtype",
    [(variant, torch.bfloat16) for variant in ("plain", "residual", "save_output", "inference")]
    + [("plain", torch.float32)],
)
def test_providers_agree_with_fp64(op, variant, dtype):
    """Ours (the reference, on the CPU) and torch compute the same outputs and the same set of gradients."""
    norm = Norm(op, 64, 256, dtype, variant)
    providers = ["cute_kernels", "torch"]
    found = bench_norm.measure_norm(norm, norm.directions, providers, FakeDevice(), repetitions=3, breakdown=False)
    assert [measurement.case.direction for measurement in found] == list(norm.directions)
    for measurement in found:
        assert measurement.failures == {}
        assert list(measurement.results) == providers
    forward, *backward = (list(measurement.results["torch"].error) for measurement in found)
    assert forward == (["y", "sum"] if variant == "residual" else ["y"])
    gradients = ["dx", "dw", *["db"] * (op == "layer_norm"), *["dresidual"] * (variant == "residual")]
    assert backward == ([] if variant == "inference" else [gradients])


def test_provider_that_cannot_be_set_up_is_reported(monkeypatch):
    def broken(norm, inputs):
        raise ImportError("No module named 'einops'")

    monkeypatch.setitem(bench_norm.PROVIDERS, "quack", broken)
    monkeypatch.setitem(bench_norm.PROVIDERS, "liger", lambda norm, inputs: None)
    found = bench_norm.measure_norm(
        Norm("rms_norm", 8, 16),
        ["fwd", "bwd"],
        ["torch", "quack", "liger"],
        FakeDevice(),
        repetitions=3,
        breakdown=False,
    )
    for measurement in found:
        assert list(measurement.results) == ["torch"]
        assert measurement.failures == {"quack": "ImportError: No module named 'einops'"}


@pytest.mark.parametrize("name", ["no_such_package", "no_such_package.pytorch.mhc", "torch.no_such_module"])
def test_provider_that_is_not_installed_is_skipped_with_a_word(capsys, name):
    assert harness.installed(["torch", "quack"], {"torch": ("torch",), "quack": ("torch", name)}) == ["torch"]
    assert capsys.readouterr().out == f"quack: {name} not installed, skipped\n"


@pytest.fixture
def on_cpu(monkeypatch):
    """`run` measures with the fake device."""
    monkeypatch.setattr(harness, "bench_stream", contextlib.nullcontext)
    monkeypatch.setattr(harness, "CudaDevice", FakeDevice)
    monkeypatch.setattr(harness, "environment", lambda commit: {**ENVIRONMENT, "commit": commit})


def test_run_writes_each_case_as_it_is_done(on_cpu, tmp_path, capsys):
    cases = [Norm(op, 16, 32) for op in bench_norm.OPS]
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    found = bench_norm.run(cases, ["cute_kernels"], pattern="bwd", commit="abc", outputs=files)
    assert [measurement.case.name for measurement in found] == [
        "rms_norm.bwd.16x32.bfloat16.plain",
        "layer_norm.bwd.16x32.bfloat16.plain",
    ]
    written = saved.read_lines(files[0])
    assert [(line["op"], line["provider"], line["commit"]) for line in written] == [
        (op, provider, "abc") for op in bench_norm.OPS for provider in ("cute_kernels", "torch")
    ]
    assert written == saved.read_lines(files[1])
    assert "rms_norm.bwd.16x32.bfloat16.plain: cute_kernels 10.0, torch 20.0, copy 30.0" in capsys.readouterr().out


def test_time_limit(on_cpu, capsys):
    cases = [Norm("rms_norm", 16, 32), Norm("rms_norm", 16, 64)]
    assert bench_norm.run(cases, ["cute_kernels"], time_limit=0.0) == []
    assert "time limit: 2 of 2 cases left, from rms_norm.fwd.16x32.bfloat16.plain on" in capsys.readouterr().out


def test_a_case_that_fails_leaves_the_others(on_cpu, monkeypatch, tmp_path, capsys):
    def out_of_memory_at_32(function):
        def limited(norm, inputs):
            if norm.cols == 32:
                raise torch.OutOfMemoryError("no memory")
            return function(norm, inputs)

        return limited

    cases = [Norm("rms_norm", 16, cols) for cols in (32, 64)]
    for name in ("fp64_truth", "_torch"):
        with monkeypatch.context() as patch:
            patch.setattr(bench_norm, name, out_of_memory_at_32(getattr(bench_norm, name)))
            patch.setitem(bench_norm.PROVIDERS, "torch", bench_norm._torch)
            path = tmp_path / name
            found = bench_norm.run(cases, ["cute_kernels"], outputs=[path])
        assert [(m.case.shape, list(m.results)) for m in found] == [
            *[("16x32", [])] * 2,
            *[("16x64", ["cute_kernels", "torch"])] * 2,
        ]
        assert {line["shape"] for line in saved.read_lines(path)} == {"16x64"}
        assert "torch failed: OutOfMemoryError: no memory" in capsys.readouterr().out
        assert [harness.exit_status(some) for some in (found, found[:1], found[2:], [])] == [1, 1, 0, 1]
    assert harness.exit_status([harness.Measurement(CASE, 1.0, {}, {"torch": "no memory"})]) == 1


def test_list_and_filter(capsys):
    assert bench_norm.main(["--list", "--filter", r"rms_norm.*bwd.*8192x4096.*plain"]) == 0
    assert capsys.readouterr().out.split() == [
        "rms_norm.bwd.8192x4096.bfloat16.plain",
        "rms_norm.bwd.8192x4096.float32.plain",
    ]


def test_unknown_provider_is_an_error(capsys):
    with pytest.raises(SystemExit):
        bench_norm.main(["--providers", "cute_kernels,apex"])
    assert "apex" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option, value, expected",
    [
        *(("--reps", value, "a number from 1 on") for value in ("0", "-5", "x")),
        ("--filter", "(", "a regular expression"),
    ],
)
def test_an_option_that_makes_no_sense_is_an_error(capsys, option, value, expected):
    with pytest.raises(SystemExit):
        bench_norm.main([option, value, "--list"])
    assert f"error: argument {option}: expected {expected}, got '{value}'" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it would measure")
def test_without_gpu(capsys):
    assert bench_norm.main([]) == 1
    assert "GPU" in capsys.readouterr().err


# The saved lines and the report


def line(**fields):
    return {
        **ENVIRONMENT,
        **{"family": "norm", "op": "rms_norm", "direction": "bwd", "shape": "8192x4096", "dtype": "bfloat16"},
        **{"variant": "plain", "provider": "cute_kernels", "us": 50.0, "us_min": 49.0, "us_max": 60.0},
        **{"bytes": 201_400_000, "flops": 1, "copy_us": 45.0, "host_us": 7.0, "kernels": {"main": 40.0, "sum": 4.0}},
        **{"error": {"dx": 1.6e-3, "dw": 1.7e-3}, "peak_bytes": 2**20},
        **fields,
    }


def test_a_line_that_is_none_is_named(tmp_path):
    path = tmp_path / "gpu.jsonl"
    path.write_text('{"us": 1.0}\n\n{"us": 2.0, "copy')
    with pytest.raises(ValueError, match=r"gpu\.jsonl, line 3: expected a JSON object, got '\{\"us\": 2"):
        saved.read_lines(path)


def test_the_last_run_is_shown():
    """The last that measured ours, and nothing that another run of the same commit measured but as a ratio in that."""
    lines = [
        line(commit="new", date="2026-01-03T00:00:00Z", us=60.0),
        line(commit="old", date="2026-01-01T00:00:00Z", us=10.0, provider="torch"),
        line(commit="new", date="2026-01-04T00:00:00Z", us=55.0),
        line(commit="new", date="2026-01-04T00:00:00Z", us=66.0, provider="liger"),
        line(commit="new", date="2026-01-03T00:00:00Z", us=90.0, provider="torch"),
        line(commit="new", date="2026-01-05T00:00:00Z", us=1.0, provider="quack"),
        line(commit="older", date="2025-01-01T00:00:00Z", family="gemm", op="gemm", provider="torch"),
    ]
    for order in (lines, lines[::-1]):
        ours, liger, other = saved.newest(order)
        assert (other["family"], other["commit"], other["provider"]) == ("gemm", "older", "torch")
        assert (ours["us"], liger["provider"], liger["us"]) == (55.0, "liger", 66.0)
        assert ours["before"] == {"torch": 1.5} and "before" not in liger
        (case,) = saved.compared([ours, liger, other])
        assert case.ratios == {"liger": 1.2, "torch": 1.5} and case.best_peer(case.ratios) == "liger"


def test_older_runs_tell_of_other_peers():
    """As ratios to ours in the same run; of each the newest, and nothing of a run that did not measure ours."""
    lines = [
        line(commit="oldest", date="2026-01-01T00:00:00Z", us=10.0),
        line(commit="oldest", date="2026-01-01T00:00:00Z", us=30.0, provider="quack"),
        line(commit="oldest", date="2026-01-01T00:00:00Z", us=40.0, provider="liger"),
        line(commit="older", date="2026-01-02T00:00:00Z", us=20.0),
        line(commit="older", date="2026-01-02T00:00:00Z", us=25.0, provider="quack"),
        line(commit="older", date="2026-01-02T00:00:00Z", us=90.0, provider="torch"),
        line(commit="older", date="2026-01-02T12:00:00Z", us=1000.0),
        line(commit="peers", date="2026-01-03T00:00:00Z", us=1.0, provider="quack"),
        line(commit="new", date="2026-01-04T00:00:00Z", us=55.0),
        line(commit="new", date="2026-01-04T00:00:00Z", us=66.0, provider="torch"),
    ]
    for order in (lines, lines[::-1]):
        ours, torch_line = saved.newest(order)
        assert (ours["us"], torch_line["us"]) == (55.0, 66.0) and "before" not in torch_line
        assert ours["before"] == {"quack": 1.25, "liger": 4.0}
    table = rows(report.speed_table(SECTION, [ours, torch_line]))
    assert table[0][4:] == ["torch", "quack", "Liger"] and table[1][4:] == ["1.200", "1.250\\*", "4.00\\*"]


SECTION = report.Section("Norms", "Rows x width.", shapes=("8192x4096",), not_peers=("nobody",))


def rows(text):
    """The cells of a table's rows, without the rule below its head."""
    found = [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines() if row[:1] == "|"]
    return found[:1] + found[2:]


def test_shapes_have_one_order():
    """By what a row has, then by the number of rows, whatever the op, its bytes or the order of the lines."""
    shapes = ["1x4096", "512x4096", "4096x4096", "2x16384", "2048x16384"]
    lines = [line(shape=shape, direction=direction) for shape in shapes for direction in ("fwd", "bwd")]
    for order in (lines, lines[::-1]):
        found = saved.newest(order)
        assert [line["shape"] for line in found] == shapes * 2
        assert [line["direction"] for line in found] == ["fwd"] * 5 + ["bwd"] * 5


def test_ratios_are_rounded_down():
    assert [report.ratio(value) for value in (0.9999, 1.0, 1.9999, 2.999)] == ["0.999", "1.000", "1.999", "2.99"]


def test_speed_table():
    """The chosen shapes and the mean of all; a dash for what nobody measured; where a peer is faster."""
    times = {"1024x4096": 40.0, "2048x4096": 60.0, "4096x4096": 80.0, "8192x4096": 100.0, "8192x8192": 49.97}
    lines = [line(shape=shape) for shape in times]
    lines += [line(shape=shape, provider="torch", us=us) for shape, us in times.items()]
    lines += [line(dtype="float32"), line(dtype="float32", provider="nobody", us=1.0)]
    text = report.speed_table(SECTION, saved.newest(lines))
    assert rows(text) == [
        ["op", "shape", "ours, µs", "share of the copy", "torch", "nobody"],
        ["rms_norm bwd", "8192x4096", "**50.0**", "0.900", "2.00", "–"],
        ["", "mean of 5 (least)", "", "0.900 (0.900)", "1.251 (0.800)", "–"],
        ["rms_norm bwd, fp32", "8192x4096", "**50.0**", "0.900", "–", "0.020"],
    ]
    assert text.endswith("A peer is faster:\n\n- rms_norm bwd: 1024x4096 (torch, 20.0 %), 8192x8192 (torch, 0.1 %)\n")
    assert report.faster_peers(SECTION, saved.compared(lines[:1])) == "A peer is faster: nowhere.\n"


def test_pages_are_reproducible(tmp_path):
    lines = [
        line(direction=direction, shape=shape, provider=provider, us=us)
        for direction in ("fwd", "bwd")
        for shape in ("32768x1024", "8192x4096")
        for provider, us in (("cute_kernels", 50.0), ("torch", 90.0), ("somebody", 70.0))
    ]
    made = []
    for order in (lines, lines[::-1]):
        folder = tmp_path / str(len(made))
        harness.append_lines(folder / "t.jsonl", order)
        report.main(folder, folder / "docs")
        made.append({path.name: path.read_bytes() for path in (folder / "docs").rglob("*.*")})
    assert made[0] == made[1]
    assert set(made[0]) == {"performance.md", "peers.svg"}, "no figure without lines"
    assert b"NVIDIA T, driver 1, torch 2, DSL 4; 2026-01-01; commits c1." in made[0]["performance.md"]


def test_the_committed_pages_are_those_of_the_committed_lines():
    """Nobody edits them: `make report` makes them."""
    for name, text in report.pages(harness.RESULTS).items():
        assert (report.DOCS / name).read_text() == text, f"docs/{name} is stale: run `make report`"


def test_figures_are_small_and_well_formed():
    batches = {2**exponent: 0.4 for exponent in range(11)}
    shares = {"torch": batches, "cute_kernels": dict.fromkeys(batches, 0.0)}
    families = {"<family>": ("a & b", {"forward": 1.2, "backward": 0.5}), "other": ("c", {"forward": 9.0})}
    made = [
        figures.bits("GPU", dict.fromkeys(("one", "two", "three"), shares)),
        figures.peers("GPU", families),
        figures.log_prob("GPU", "shape", {"forward": {"cute_kernels": (0.0, 2.0), "torch": (3.0, 4.0)}}),
    ]
    for svg in made:
        root = ElementTree.fromstring(svg)
        assert root.tag.endswith("svg") and len(svg) < 32_000 and "NaN" not in svg
    assert "0.50×" in made[1] and "9.00×" in made[1] and "&lt;family&gt;" in made[1]


def test_kernels_ares_precompiled():
    """Each case once, its backward where it has one; of one that fails the measurement tells."""
    calls = []

    def make(case):
        def forward():
            calls.append((case, "fwd"))
            if case == broken:
                raise RuntimeError("no such kernel")

        return forward, lambda: lambda: calls.append((case, "bwd"))

    both, broken = (Norm("rms_norm", rows, 8) for rows in (4, 5))
    alone = dataclasses.replace(both, op="layer_norm", variant="inference")
    assert both.directions == broken.directions == ("fwd", "bwd") and alone.directions == ("fwd",)
    synchronized = []
    device = SimpleNamespace(synchronize=lambda: synchronized.append(len(calls)))
    forward_backward.compile_kernels(make, [broken, both, alone, both], device)
    assert calls == [(broken, "fwd"), (both, "fwd"), (both, "bwd"), (alone, "fwd")] and synchronized == [4]
