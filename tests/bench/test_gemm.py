"""bench_gemm's logic on the CPU: cases, inputs, what is checked, tables and report; a fake device measures."""

import contextlib
import functools
import re

import pytest
import torch

from bench import bench_gemm, harness, report, saved
from bench.bench_gemm import FLOOR, Gemm
from tests.bench.test_harness import ENVIRONMENT, SCHEMA, FakeDevice, rows

BATCH = Gemm(70, 80, 48, variant="batch", entries=3)
SMALL = [Gemm(96, 80, 48), Gemm(96, 80, 48, "dA"), Gemm(96, 80, 48, "dB"), Gemm(3, 80, 48, variant="decode")]


class InPlace(FakeDevice):
    """Hands out the very tensors that a call writes, as a graph does."""

    def capture(self, call):
        return harness.Captured(call, call, tuple(call()))


measure = functools.partial(bench_gemm.measure_gemm, device=InPlace(), repetitions=3, breakdown=False)


def test_cases_are_those_of_the_specification():
    cases = bench_gemm.gemms()
    names = [gemm.case.name for gemm in cases]
    assert len(set(names)) == len(names) == 84 + 14 * 15 + 3

    def count(pattern):
        return sum(re.fullmatch(pattern, name) is not None for name in names)

    assert count(r"mm\.fwd\..*\.prefill") == 10
    assert count(r"mm\.d[AB]\..*\.prefill") == 12
    assert count(r"mm\.fwd\..*\.decode") == 9 * 6
    assert count(r"mm\.fwd\..*\.tokens") == 14 * 15 + 3
    assert count(r"linear\..*") == 4
    assert count(r"bmm\.fwd\..*\.batch") == 4
    assert "bmm.fwd.64x1024x128x1024.bfloat16.batch" in names
    assert "mm.fwd.4096x151936x4096.bfloat16.prefill" in names
    assert "mm.dB.4096x4096x14336.bfloat16.prefill" in names
    assert "mm.fwd.256x1024x4096.bfloat16.decode" in names
    assert set(bench_gemm.gemms(quick=True)) < set(cases)


def test_minimal_bytes_and_flops():
    assert Gemm(2, 3, 5).case.bytes == 2 * (2 * 5 + 3 * 5 + 2 * 3)
    assert {Gemm(2, 3, 5, direction).case.bytes for direction in bench_gemm.DIRECTIONS} == {62}
    assert {Gemm(2, 3, 5, direction).case.flops for direction in bench_gemm.DIRECTIONS} == {60}
    assert bench_gemm.minimal_bytes(Gemm(2, 3, 5, variant="bias_gelu")) == 62 + 6
    batch = Gemm(2, 3, 5, variant="batch", entries=7).case
    assert (batch.bytes, batch.flops, batch.shape) == (7 * 62, 7 * 60, "7x2x3x5")
    assert bench_gemm.minimal_bytes(Gemm(2, 3, 5, "dB", "accumulate")) == 62 - 2 * 15 + 8 * 15


@pytest.mark.parametrize("gemm", SMALL)
def test_inputs_are_views_of_row_major_matrices(gemm):
    first, second = bench_gemm.make_inputs(gemm, "cpu"), bench_gemm.make_inputs(gemm, "cpu")
    rows, cols, summed = gemm.product
    assert first.a.shape == (rows, summed) and first.b.shape == (summed, cols)
    assert torch.equal(first.a, second.a) and torch.equal(first.b, second.b)
    assert (first.a.t() if gemm.direction == "dB" else first.a).is_contiguous()
    assert (first.b.t() if gemm.direction == "fwd" else first.b).is_contiguous()
    assert 0.8 < float((first.a.float() @ first.b.float()).std()) < 1.2


@pytest.mark.parametrize("rows, cols", [(96, 80), (64, 200), (3, 80)])
def test_sample(rows, cols):
    """A wrong number in a sampled row or column, a NaN anywhere and a wrong shape are seen."""
    gemm = Gemm(rows, cols, 16)
    inputs, sample = bench_gemm.make_inputs(gemm, "cpu"), bench_gemm.Sample(gemm, "cpu")
    exact = inputs.a.double() @ inputs.b.double()
    truth = sample.truth(inputs)
    assert truth.numel() == (min(rows, 64) * cols + (0 if rows <= 64 else 64 * rows))
    assert harness.relative_rms(sample(exact), truth) < 1e-12
    for place in ((sample.rows[0], 1), (0, 5) if rows <= 64 else (0, sample.cols[-1])):
        wrong = exact.clone()
        wrong[place] += 10
        assert harness.relative_rms(sample(wrong), truth) > 0.05
    hole = exact.clone()
    hole[rows - 1, cols - 1] = float("nan")
    assert not harness.relative_rms(sample(hole), truth) < 1
    assert harness.relative_rms(sample(exact.t().contiguous()), truth) == float("inf")


def test_sample_of_a_batch():
    """The samples of all entries are one tensor of numbers, in which a wrong entry is seen."""
    inputs, sample = bench_gemm.make_inputs(BATCH, "cpu"), bench_gemm.Sample(BATCH, "cpu")
    assert inputs.a.shape == (3, 70, 48) and inputs.b.shape == (3, 48, 80) and inputs.b.mT.is_contiguous()
    exact, truth = inputs.a.double() @ inputs.b.double(), sample.truth(inputs)
    assert truth.numel() == 3 * (64 * 80 + 70 * 64)
    assert harness.relative_rms(sample(exact), truth) < 1e-12
    assert harness.relative_rms(sample(exact[[0, 1, 1]]), truth) > 0.1


@pytest.mark.parametrize("gemm", [*SMALL, BATCH, Gemm(96, 80, 48, variant="bias_gelu")])
def test_providers_agree_with_fp64(gemm):
    """Ours (the reference, on the CPU) and torch compute the same."""
    own = gemm.variant in ("bias_gelu", "batch")  # linear and bmm return another tensor each time
    device = FakeDevice() if own else InPlace()
    found = measure(gemm, ["cute_kernels", "cublas"], device=device)
    assert found.failures == {}
    assert list(found.results) == ["cute_kernels", "cublas"]
    assert all(0 < error < 5e-3 for result in found.results.values() for error in result.error.values())


def test_transposed_result_is_refused(monkeypatch):
    def transposed(gemm, inputs):
        return lambda: ((inputs.a @ inputs.b).t(),)

    monkeypatch.setitem(bench_gemm.PROVIDERS, "quack", transposed)
    assert "wrong result: y" in measure(SMALL[0], ["cublas", "quack"]).failures["quack"]


def test_accumulation_starts_from_main_grad(monkeypatch):
    """The replay that is checked adds to `start`, not to what earlier calls left; not adding is an error."""

    def adds(gemm, inputs):
        out = inputs.new_out()
        return lambda: (out.add_(inputs.a.float() @ inputs.b.float()),)

    def overwrites(gemm, inputs):
        out = inputs.new_out()
        return lambda: (out.copy_(inputs.a.float() @ inputs.b.float()),)

    monkeypatch.setitem(bench_gemm.PROVIDERS, "cublas", adds)
    monkeypatch.setitem(bench_gemm.PROVIDERS, "quack", overwrites)
    found = measure(Gemm(96, 80, 48, "dB", "accumulate"), ["cublas", "quack"])
    assert found.results["cublas"].error["dw"] < 1e-5
    assert "wrong result: dw" in found.failures["quack"]


def test_floor_is_timed_and_not_checked(monkeypatch):
    monkeypatch.setitem(bench_gemm.PROVIDERS, FLOOR, lambda gemm, inputs: lambda: (inputs.b.float().sum(),))
    found = measure(SMALL[3], ["cute_kernels", FLOOR, "cublas"])
    assert [(name, result.us) for name, result in found.results.items()] == [
        ("cute_kernels", 10.0),
        ("cublas", 20.0),
        (FLOOR, 30.0),
    ]
    lines = harness.lines(found, ENVIRONMENT)
    assert all(list(line) == SCHEMA for line in lines)
    assert {line["provider"]: line["error"] for line in lines}[FLOOR] == {}
    assert (lines[0]["family"], lines[0]["op"], lines[0]["shape"]) == ("gemm", "mm", "3x80x48")


def test_without_the_yardstick_nothing_is_kept(monkeypatch):
    def fails(gemm, inputs):
        def call():
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

        return call

    monkeypatch.setitem(bench_gemm.PROVIDERS, "cublas", fails)
    found = measure(SMALL[0], ["cute_kernels", "cublas"])
    assert found.results == {} and harness.lines(found, ENVIRONMENT) == []
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in found.failures["cublas"]


def test_run_writes_prints_and_sums_up(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(harness, "bench_stream", contextlib.nullcontext)
    monkeypatch.setattr(harness, "CudaDevice", lambda **options: InPlace())
    monkeypatch.setattr(harness, "environment", lambda commit: {**ENVIRONMENT, "commit": commit})
    path = tmp_path / "one.jsonl"
    found = bench_gemm.run(SMALL, ["cute_kernels"], pattern="dA|decode", commit="abc", outputs=[path])
    assert [(line["direction"], line["provider"], line["commit"]) for line in saved.read_lines(path)] == [
        (direction, provider, "abc") for direction in ("dA", "fwd") for provider in ("cute_kernels", "cublas")
    ]
    bench_gemm.print_table(found)
    bench_gemm.print_summary(found)
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    assert ["mm", "dA", "96x80x48", "prefill", "10.0", "0", "20.0", "2.000", "2.000", "-"] in [row[:10] for row in rows]
    assert ["dA", "prefill", "1", "2.000", "2.000", "96x80x48", "-"] in [row[:7] for row in rows]
    assert bench_gemm.run(SMALL, ["cute_kernels"], time_limit=0.0) == []
    assert "time limit: 4 of 4 cases left, from mm.fwd.96x80x48.bfloat16.prefill on" in capsys.readouterr().out


def test_summary():
    times = [
        ("fwd", "decode", "1x2x3", {"cute_kernels": 10.0, "cublas": 12.0, FLOOR: 8.0}),
        ("fwd", "decode", "2x2x3", {"cute_kernels": 10.0, "cublas": 10.0, FLOOR: 9.5}),
        ("fwd", "decode", "65x2x3", {"cute_kernels": 10.0, "cublas": 12.0, FLOOR: 1.0}),  # no goal of reading
        ("dA", "prefill", "4x2x3", {"cute_kernels": 10.0, "cublas": 9.0}),
        ("dB", "prefill", "4x2x3", {"cublas": 9.0}),
        *(("fwd", "tokens", f"{m}x2x3", {"cute_kernels": 10.0, "cublas": 11.0 + m / 10}) for m in range(38)),
        *(("fwd", "tokens", f"{m}x2x3", {"cute_kernels": 10.0, "cublas": 8.0 + m / 100}) for m in (100, 150)),
    ]
    decode, gradient, tokens = bench_gemm.summarize(times)
    assert (decode.cases, decode.least, decode.least_shape) == (3, 1.0, "2x2x3")
    assert decode.mean == pytest.approx(1.44 ** (1 / 3))
    assert (decode.floor, decode.floor_shape) == (1.25, "1x2x3")
    assert decode.verdict == "every >= 1.0 ok, floor, M <= 64, <= 1.10 --"
    assert gradient.verdict == "mean >= 0.97 --, every >= 0.93 --" and gradient.floor is None
    assert (tokens.cases, tokens.least, tokens.most) == (40, 0.9, 1.1)
    assert tokens.verdict == "mean >= 1.05 ok, 95% >= 0.97 ok, every >= 0.9 ok"


def test_list_and_filter(capsys):
    assert bench_gemm.main(["--list", "--filter", r"16x.*decode"]) == 0
    assert capsys.readouterr().out.split() == [
        f"mm.fwd.16x{n}x{k}.bfloat16.decode" for n, k in bench_gemm.DECODE_LAYERS
    ]


def test_unknown_provider_is_an_error(capsys):
    with pytest.raises(SystemExit):
        bench_gemm.main(["--providers", "cute_kernels,mkl"])
    assert "mkl" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it would measure")
def test_without_gpu(capsys):
    assert bench_gemm.main([]) == 1
    assert "GPU" in capsys.readouterr().err


def test_speed_table():
    """cuBLAS, the peers and the floor by their time over ours, for all directions; no share of a copy."""
    lines = []
    for gemm in bench_gemm.gemms():
        for factor, provider in enumerate(bench_gemm.DEFAULT_PROVIDERS, start=10):
            if provider != FLOOR or gemm.variant == "decode":
                error = {} if provider == FLOOR else {"y": 1.7e-3}
                result = harness.Result(float(factor), 9.0, 30.0, 5.0, 0, error, {})
                lines += harness.lines(harness.Measurement(gemm.case, 8.0, {provider: result}, {}), ENVIRONMENT)
    table = rows(report.speed_table(report.SECTIONS["gemm"], saved.newest(lines)))
    assert table[0] == ["op", "shape", "ours, µs", "cuBLAS", "quack", "Triton", "reading alone"]
    assert ["", "1x4096x4096", "**10.0**", "1.100", "1.200", "1.300", "1.400"] in table
    assert ["", "8192x8192x8192", "**10.0**", "1.100", "1.200", "1.300", "–"] in table
    assert {"mm fwd", "mm fwd, decode", "mm dA", "mm dB", "linear dB, accumulate"} < {row[0] for row in table}
