"""bench_mxfp8's logic on the CPU: cases, bytes, what is checked, tables and report; a fake device measures."""

import contextlib
import functools
import math

import pytest
import torch

from bench import bench_mxfp8, harness, report, saved
from bench.bench_mxfp8 import Quantize
from tests.bench.test_harness import ENVIRONMENT, SCHEMA, FakeDevice, rows

SMALL = [
    Quantize("quantize_3d_colwise", (2, 64, 96)),
    Quantize("quantize_3d_dual", (3, 96, 64), variant="blocked"),
    Quantize("quantize_3d_dual", (2, 64, 64), variant="square"),
    Quantize("quantize_3d_dual", (2, 64, 64), dtype=torch.float32, variant="square_blocked"),
    Quantize("quantize_3d_colwise", (2, 64, 96), variant="square"),
    Quantize("quantize_3d_colwise", (2, 64, 96), variant="transposed"),
    Quantize("quantize_rowwise", (64, 96)),
    Quantize("quantize_colwise", (64, 96)),
    Quantize("quantize_dual", (64, 96), dtype=torch.float16),
    *(Quantize("dequantize", shape, variant=v) for shape in ((64, 96), (2, 64, 96)) for v in ("rows", "columns")),
]
measure = functools.partial(bench_mxfp8.measure_quantize, device=FakeDevice(), repetitions=3, breakdown=False)


def test_cases_are_those_of_the_specification():
    cases = bench_mxfp8.quantizes()
    names = [quantize.case.name for quantize in cases]
    assert len(set(names)) == len(names)
    for experts in (1, 2, 4, 8, 16, 32, 64):
        for op in bench_mxfp8.OPS:
            assert f"{op}.fwd.{experts}x8192x5120.bfloat16.plain" in names
    for shape in ("1x7168x2048", "32x7168x2048", "8x1408x2048", "4x2880x2880"):
        assert f"quantize_3d_dual.fwd.{shape}.bfloat16.plain" in names
    for op in bench_mxfp8.MATRIX_OPS:
        assert f"{op}.fwd.131072x7168.bfloat16.plain" in names
    assert set(bench_mxfp8.quantizes(quick=True)) < set(cases)


def test_goals():
    def goal(op, shape, **options):
        return Quantize(op, shape, **options).case.goal

    assert goal("quantize_3d_colwise", (1, 8192, 5120)) == 0.90
    assert goal("quantize_3d_colwise", (1, 7168, 2048)) == 0.80
    assert goal("quantize_3d_dual", (64, 8192, 5120)) == 1 / 1.10
    assert goal("quantize_3d_colwise", (4, 2880, 2880)) == 0.80
    assert goal("quantize_3d_dual", (4, 2880, 2880)) == 1 / 1.10
    assert goal("quantize_3d_dual", (1, 8192, 5120), dtype=torch.float32) is None


@pytest.mark.parametrize("quantize", SMALL, ids=lambda quantize: quantize.case.name)
def test_minimal_bytes(quantize):
    """Inputs and outputs, each tensor once."""
    x = bench_mxfp8.make_input(quantize, "cpu")
    inputs = bench_mxfp8.operands(quantize, x)
    outputs = bench_mxfp8.public_function(quantize, bench_mxfp8.reference)(*inputs)
    memory = {t.data_ptr(): t.numel() * t.element_size() for t in (*inputs, *outputs)}
    assert quantize.case.bytes == sum(memory.values())


def test_bytes_an_element():
    def of(op, **options):
        quantize = Quantize(op, (2, 8192, 5120), **options)
        return quantize.case.bytes / math.prod(quantize.shape)

    assert of("quantize_3d_colwise") == 3.03125 and of("quantize_3d_dual") == 4.0625
    assert of("quantize_3d_dual", dtype=torch.float32) == 6.0625
    assert of("quantize_3d_colwise", variant="square") == 3 + 1 / 1024
    assert of("quantize_3d_dual", variant="square") == 4 + 1 / 1024


@pytest.mark.parametrize("quantize", SMALL, ids=lambda quantize: quantize.case.name)
def test_providers_agree_in_every_byte(quantize, monkeypatch):
    """Ours (the reference, on the CPU) and the compiled reference."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    x = bench_mxfp8.make_input(quantize, "cpu")
    assert torch.equal(x, bench_mxfp8.make_input(quantize, "cpu")) and x.shape == quantize.shape
    assert (x.stride(-2) == 1) == (quantize.variant == "transposed")
    found = measure(quantize, ["cute_kernels", "torch_compile"])
    assert found.failures == {} and list(found.results) == ["cute_kernels", "torch_compile"]
    assert all(error == 0 for result in found.results.values() for error in result.error.values())
    assert list(found.results["cute_kernels"].error) == list(bench_mxfp8.OUTPUTS[quantize.op])


@pytest.mark.parametrize("size", [1, 5, 1 << 16, (1 << 16) + 1, 1 << 20])
def test_places(size):
    places = bench_mxfp8._places(size, "cpu")
    assert int(places[0]) == 0 and int(places[-1]) == size - 1
    assert len(places) == min(size, bench_mxfp8.SAMPLE) and 0 <= int(places.min()) <= int(places.max()) < size


@pytest.mark.parametrize("output", [0, 1, 2, 3])
def test_one_wrong_byte_is_refused(output, monkeypatch):
    """A wrong byte of the last expert is refused in any output, and so is a missing output; nothing of ours is kept."""
    quantize = SMALL[1]

    def damaged(quantize, inputs):
        def call():
            outputs = [t.clone() for t in bench_mxfp8._cute_kernels(quantize, inputs)()]
            outputs[output].as_strided((outputs[output].numel(),), (1,)).view(torch.uint8)[-1] ^= 1
            return outputs

        return call

    def fewer(quantize, inputs):
        return lambda: bench_mxfp8._cute_kernels(quantize, inputs)()[:3]

    monkeypatch.setitem(bench_mxfp8.PROVIDERS, "torchao", damaged)
    monkeypatch.setitem(bench_mxfp8.PROVIDERS, "torch_compile", fewer)
    found = measure(quantize, ["cute_kernels", "torch_compile", "torchao"])
    name = bench_mxfp8.OUTPUTS[quantize.op][output]
    assert f"other bytes than the reference's: {name} " in found.failures["torchao"]
    assert "wrong result" in found.failures["torch_compile"]
    lines = harness.lines(found, ENVIRONMENT)
    assert [line["provider"] for line in lines] == ["cute_kernels"] and list(lines[0]) == SCHEMA
    monkeypatch.setitem(bench_mxfp8.PROVIDERS, "cute_kernels", damaged)
    monkeypatch.setattr(bench_mxfp8, "_cute_kernels", functools.partial(bench_mxfp8._cute_kernels))
    assert measure(quantize, ["cute_kernels"]).results == {}


def test_a_failure_of_ours_leaves_the_other_cases(monkeypatch):
    def fails(quantize, inputs):
        raise RuntimeError("no kernel")

    monkeypatch.setitem(bench_mxfp8.PROVIDERS, "cute_kernels", fails)
    found = measure(SMALL[0], ["cute_kernels"])
    assert found.results == {} and "no kernel" in found.failures["cute_kernels"]


def test_run_writes_and_prints(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(harness, "bench_stream", contextlib.nullcontext)
    monkeypatch.setattr(harness, "CudaDevice", lambda **options: FakeDevice())
    monkeypatch.setattr(harness, "environment", lambda commit: {**ENVIRONMENT, "commit": commit})
    path = tmp_path / "one.jsonl"
    found = bench_mxfp8.run(SMALL, ["cute_kernels"], pattern="3d_dual", commit="abc", outputs=[path])
    lines = saved.read_lines(path)
    assert len(found) == len(lines) == 3
    assert {(line["op"], line["provider"], line["commit"]) for line in lines} == {
        ("quantize_3d_dual", "cute_kernels", "abc")
    }
    assert all(set(line["error"].values()) == {0.0} for line in lines)
    harness.print_table(found)
    assert "square_blocked float32" in capsys.readouterr().out
    assert bench_mxfp8.run(SMALL, ["cute_kernels"], time_limit=0.0) == []
    assert f"time limit: {len(SMALL)} of {len(SMALL)} cases left" in capsys.readouterr().out


def test_flatness(capsys):
    result = harness.Result(10.0, 9.0, 11.0, 5.0, 0, {"q": 0.0}, {})
    found = [
        harness.Measurement(Quantize("quantize_3d_dual", (experts, 7168, 2048)).case, copy_us, results, {})
        for experts, copy_us, results in (
            (1, 8.0, {"cute_kernels": result}),
            (8, 9.0, {"cute_kernels": result}),
            (32, 9.0, {"cute_kernels": result}),
        )
    ]
    name = "quantize_3d_dual 7168x2048 bfloat16 plain"
    assert bench_mxfp8.flatness(found) == {name: (0.8, 0.9)}
    assert bench_mxfp8.flatness(found[:2]) == {}
    bench_mxfp8.print_flatness(found)
    assert capsys.readouterr().out.strip() == (
        f"{name}: 0.800 of the copy with 1 expert, 0.900 with 32; goal: within 0.05 --"
    )


def test_list_and_filter(capsys):
    assert bench_mxfp8.main(["--list", "--filter", r"dequantize.*\.8x7168"]) == 0
    assert capsys.readouterr().out.split() == [
        f"dequantize.fwd.8x7168x2048.bfloat16.{variant}" for variant in ("rows", "columns")
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it would measure")
def test_without_gpu(capsys):
    assert bench_mxfp8.main([]) == 1
    assert "GPU" in capsys.readouterr().err


def test_speed_table():
    lines = []
    for quantize in bench_mxfp8.quantizes():
        result = harness.Result(10.0, 9.0, 30.0, 5.0, 0, dict.fromkeys(bench_mxfp8.OUTPUTS[quantize.op], 0.0), {})
        lines += harness.lines(harness.Measurement(quantize.case, 9.5, {"cute_kernels": result}, {}), ENVIRONMENT)
    table = rows(report.speed_table(report.SECTIONS["mxfp8"], saved.newest(lines)))
    assert ["quantize_rowwise fwd", "8192x2048", "**10.0**", "0.950"] in table
    assert ["quantize_3d_dual fwd, square_blocked", "8x7168x2048", "**10.0**", "0.950"] in table
