"""bench_mhc's logic on the CPU: cases, inputs, providers, what is checked, tables, report; a fake device measures."""

import contextlib
import functools
import re
import sys
import types

import pytest
import torch

from bench import bench_mhc, harness, report, saved
from bench.bench_mhc import Connection
from cute_kernels.mhc import reference
from tests.bench.test_harness import ENVIRONMENT, SCHEMA, FakeDevice, rows

SMALL = [Connection(op, 24, 40, layout=layout) for op in bench_mhc.OUTPUTS for layout in bench_mhc.LAYOUTS]
OURS = ["cute_kernels", "torch"]

measure = functools.partial(bench_mhc.measure_connection, device=FakeDevice(), repetitions=3, breakdown=False)


def test_cases_are_those_of_the_specification():
    cases = bench_mhc.connections()
    names = [connection.case(direction).name for connection in cases for direction in connection.directions]
    assert len(set(names)) == len(names) == 143

    def count(pattern):
        return sum(re.search(pattern, name) is not None for name in names)

    for op in bench_mhc.OPS:
        for direction in bench_mhc.DIRECTIONS:
            for layout in bench_mhc.LAYOUTS:
                assert count(rf"^{op}\.{direction}\.\d+x4x\d+\.bfloat16\.{layout}$") == 6
                assert count(rf"^{op}\.{direction}\.\d+x[28]x4096\.bfloat16\.{layout}$") == 2
    for op in bench_mhc.WHOLE_OPS:
        assert count(rf"^{op}\.(fwd|bwd)\.(8192x4x4096|4096x4x7168)\.bfloat16\.streams$") == 4
    assert count(r"^layer\.fwd\.\d+x4x.*\.streams") == count(r"^layer\.bwd\.\d+x4x.*\.streams") == 6
    assert count(r"^layer\.(fwd|bwd)\.\d+x4x.*\.channels") == 4
    assert count(r"^layer\.(fwd|bwd)\.\d+x[28]x4096\.bfloat16\.(streams|channels)$") == 8
    assert count(r"^decode\.fwd\.(1|16|128)x4x7168\.") == count("^decode") == 3
    assert count(r"^coefficients_sinkhorn\.(fwd|bwd)\.(8192|4096)x4\.float32\.plain") == 4
    assert "expand_combine.bwd.8192x4x4096.bfloat16.channels" in names
    assert set(bench_mhc.connections(quick=True)) < set(cases)


def test_goals():
    def goal(op, direction, **options):
        return Connection(op, 8192, 4096, **options).case(direction).goal

    assert [goal("projection", direction) for direction in bench_mhc.DIRECTIONS] == [0.85, 0.75]
    assert [goal("layer", direction) for direction in bench_mhc.DIRECTIONS] == [0.80, 0.80]
    for op in ("aggregate", "expand_combine"):
        assert [goal(op, "bwd", n=n) for n in (2, 4, 8)] == [0.85, 0.92, 0.85]
    assert goal("projection", "fwd", n=8) is goal("decode", "fwd") is goal("coefficients_sinkhorn", "bwd") is None


def test_minimal_bytes():
    def units(op, direction, n=4):
        return bench_mhc.minimal_bytes(Connection(op, 100, 512, n), direction) / (100 * 512 * 2)

    assert [units("projection", direction) for direction in bench_mhc.DIRECTIONS] == [4, 8]
    assert [units("aggregate", direction) for direction in bench_mhc.DIRECTIONS] == [5, 9]
    assert [units("expand_combine", direction) for direction in bench_mhc.DIRECTIONS] == [9, 14]
    assert [units("layer", direction) for direction in bench_mhc.DIRECTIONS] == [14, 28]
    assert [units("expand_combine", direction, n=2) for direction in bench_mhc.DIRECTIONS] == [5, 8]
    assert [units("aggregate", direction, n=8) for direction in bench_mhc.DIRECTIONS] == [9, 17]
    assert bench_mhc.minimal_bytes(Connection("decode", 1, 512), "fwd") == 5 * 1024 + 4 * 24 * 2048
    coefficients = Connection("coefficients_sinkhorn", 100, 512)
    assert bench_mhc.minimal_bytes(coefficients, "fwd") == 100 * 4 * (24 + 1 + 24)
    assert bench_mhc.minimal_bytes(coefficients, "bwd") == 100 * 4 * (3 * 24 + 2)


def test_inputs_depend_on_the_case_only():
    connection = Connection("layer", 8, 16)
    first, second = bench_mhc.make_inputs(connection, "cpu"), bench_mhc.make_inputs(connection, "cpu")
    assert list(first.tensors) == ["x", "phi", "alpha", "beta", "f"]
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, second.tensors[name]) and tensor.requires_grad and tensor.is_leaf
    assert first.tensors["x"].shape == (8, 4, 16) and first.tensors["x"].dtype == torch.bfloat16
    assert all(first.tensors[name].dtype == torch.float32 for name in ("phi", "alpha", "beta"))
    channels = bench_mhc.make_inputs(Connection("layer", 8, 16, layout="channels"), "cpu")
    assert channels.tensors["x"].shape == channels.grad_outputs[0].shape == (8, 16, 4)
    decode = bench_mhc.make_inputs(Connection("decode", 8, 16), "cpu")
    assert decode.grad_outputs == () and not any(tensor.requires_grad for tensor in decode.tensors.values())


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("connection", SMALL, ids=lambda connection: f"{connection.op}-{connection.layout}")
def test_providers_agree_with_fp64(connection, n):
    """Ours (the reference, on the CPU) and torch compute the same outputs and the same set of gradients."""
    connection = Connection(connection.op, connection.tokens, connection.channels, n, connection.layout)
    found = measure(connection, connection.directions, OURS)
    assert [measurement.case.direction for measurement in found] == list(connection.directions)
    for measurement in found:
        assert measurement.failures == {}
        assert list(measurement.results) == OURS
        errors = [error for result in measurement.results.values() for error in result.error.values()]
        exact = connection.op in ("expand", "contract")  # copies, and a quarter of a gradient
        assert all((exact or error > 0) and error < 4e-3 for error in errors)
    forward, *backward = (tuple(measurement.results["torch"].error) for measurement in found)
    assert forward == bench_mhc.OUTPUTS[connection.op]
    arguments = tuple(f"d{name}" for name in bench_mhc.make_inputs(connection, "cpu").tensors)
    assert backward == [arguments] * (connection.op != "decode")


@pytest.mark.parametrize("op", ["coefficients_sinkhorn", "layer"])
def test_compiled_reference_is_one_graph(monkeypatch, op):
    """torch.compile traces forward and backward whole; without its code generator here."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    for measurement in measure(Connection(op, 8, 16), bench_mhc.DIRECTIONS, ["torch", "torch_compile"]):
        assert measurement.failures == {} and list(measurement.results) == ["torch", "torch_compile"]


def test_layer_is_measured_through_hyper_connection(monkeypatch):
    """Its backward is the one that writes dx once; the sublayer hands on the gradient that is given."""
    called = []

    def hyper_connection(x, sublayer, *parameters, **options):
        called.append(options)
        return reference.hyper_connection(x, sublayer, *parameters, **options)

    monkeypatch.setattr(bench_mhc.mhc, "hyper_connection", hyper_connection)
    connection = Connection("layer", 8, 16, layout="channels")
    (backward,) = measure(connection, ["bwd"], OURS)
    assert backward.failures == {} and called == [{"variant": bench_mhc.VARIANT, "layout": "channels"}]
    given = bench_mhc.Given.backward
    monkeypatch.setattr(bench_mhc.Given, "backward", lambda ctx, df: (torch.zeros_like(df), *given(ctx, df)[1:]))
    (backward,) = measure(connection, ["bwd"], OURS)
    assert "wrong result: dx" in backward.failures["cute_kernels"]


def transformer_engine(monkeypatch):
    """Its functions with its shapes, from our reference: (s, b, C, n) residuals, H of 32 columns."""
    layout, shared = {"layout": "channels"}, {"variant": bench_mhc.VARIANT}

    def projection(x, phi):
        H, mean_square = reference.projection(x.unflatten(-1, (-1, 4)), phi, **layout)
        return torch.nn.functional.pad(H, (0, 8), value=7.0), mean_square

    def scale(H, alpha, beta, mean_square, n):
        assert H.shape[1] == 32 and beta.shape == (1, 24)
        pre, post, res = reference.coefficients(H[:, :24], mean_square, alpha, beta[0], n, **shared)
        return pre, post, res.flatten(1)

    def sinkhorn(logits, n, iters):
        assert logits.shape[1:] == (1, n, n)
        return reference.sinkhorn(logits, iterations=iters, variant="log")

    def expand_combine(f, bias, post, x, res, n):
        assert bias is None and x.shape == (*f.shape, n)
        return reference.expand_combine(f, post, x, res, **layout)

    def mix_and_aggregate(x, phi, alpha, beta):
        assert x.shape[1] == 1
        return reference.pre(x, phi, alpha, beta[0], **layout, **shared)

    module = types.SimpleNamespace(
        mhc_fused_projection=projection,
        mhc_fused_scale=scale,
        mhc_fused_sinkhorn=sinkhorn,
        mhc_fused_aggregate=lambda x, pre, n: reference.aggregate(x, pre, **layout),
        mhc_fused_expand_combine=expand_combine,
        mhc_generate_mix_and_aggregate=mix_and_aggregate,
    )
    (name,) = bench_mhc.PACKAGES["transformer_engine"]
    parents = [name.rsplit(".", count)[0] for count in (1, 2, 3)]
    for parent in parents:
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    sys.modules[parents[0]].mhc = module
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("op", [op for op in bench_mhc.OUTPUTS if op not in bench_mhc.WHOLE_OPS])
def test_transformer_engine_is_called_with_its_shapes(monkeypatch, op):
    transformer_engine(monkeypatch)
    connection = Connection(op, 24, 40, layout="channels")
    for measurement in measure(connection, connection.directions, ["torch", "transformer_engine"]):
        assert measurement.failures == {}
        assert list(measurement.results) == ["torch", "transformer_engine"]


def test_transformer_engine_has_one_layout_and_four_streams(monkeypatch):
    transformer_engine(monkeypatch)
    for connection in (Connection("aggregate", 24, 40), Connection("aggregate", 24, 40, 8, "channels")):
        (forward,) = measure(connection, ["fwd"], ["torch", "transformer_engine"])
        assert list(forward.results) == ["torch"] and forward.failures == {}


def test_provider_that_cannot_be_set_up_is_reported(monkeypatch):
    def broken(connection, inputs):
        raise ImportError("No module named 'triton'")

    monkeypatch.setitem(bench_mhc.PROVIDERS, "transformer_engine", broken)
    for measurement in measure(SMALL[0], bench_mhc.DIRECTIONS, ["torch", "transformer_engine"]):
        assert list(measurement.results) == ["torch"]
        assert measurement.failures == {"transformer_engine": "ImportError: No module named 'triton'"}


def test_least_errors():
    def least(op, name):
        return bench_mhc.least_errors(Connection(op, 8, 16), [name])[name]

    assert least("aggregate", "dpre") == least("projection", "mean_square") == 2.0**-20
    assert least("projection", "H") == least("layer", "dphi") == least("layer", "dalpha") / 8 == 2.0**-12
    assert least("coefficients_sinkhorn", "res") == 2.0**-15


def test_error_that_counts_as_rounding(monkeypatch):
    """As far off as a tf32 product is right, ten times that is not."""

    def off(by):
        def make(connection, inputs):
            forward, make_backward = bench_mhc._torch(connection, inputs)
            return lambda: tuple(output * (1 + by) for output in forward()), make_backward

        return make

    for by, right in ((2e-4, True), (2e-3, False)):
        monkeypatch.setitem(bench_mhc.PROVIDERS, "cute_kernels", off(by))
        (forward,) = measure(Connection("projection", 24, 40), ["fwd"], OURS)
        reason = forward.failures.get("cute_kernels", "")
        assert ("H" not in reason) == right and "mean_square" in reason


@pytest.fixture
def on_cpu(monkeypatch):
    """`run` measures with the fake device."""
    monkeypatch.setattr(harness, "bench_stream", contextlib.nullcontext)
    monkeypatch.setattr(harness, "CudaDevice", FakeDevice)
    monkeypatch.setattr(harness, "environment", lambda commit: {**ENVIRONMENT, "commit": commit})


def test_run_writes_prints_and_sums_up(on_cpu, tmp_path, capsys):
    path = tmp_path / "one.jsonl"
    before = torch.get_float32_matmul_precision()
    pattern = r"aggregate\.bwd.*streams|decode.*channels"
    found = bench_mhc.run(SMALL, ["cute_kernels"], pattern=pattern, commit="abc", outputs=[path])
    assert torch.get_float32_matmul_precision() == before
    written = saved.read_lines(path)
    assert all(list(line) == SCHEMA for line in written)
    assert [(line["op"], line["direction"], line["shape"], line["variant"], line["provider"]) for line in written] == [
        (op, direction, "24x4x40", layout, provider)
        for op, direction, layout in (("aggregate", "bwd", "streams"), ("decode", "fwd", "channels"))
        for provider in OURS
    ]
    harness.print_table(found)
    bench_mhc.print_summary(found)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = ["aggregate", "bwd", "24x4x40", "streams", "10.0", "30.0", "3.000", "0.92", "ok", "20.0"]
    assert table in [row[:10] for row in rows]
    numbers = ["1", "3.000", "3.000", "24x4x40"]
    assert ["aggregate", "bwd", "4", "streams", *numbers, "every", ">=", "0.92", "ok"] in rows
    assert ["decode", "fwd", "4", "channels", *numbers, "kernels", "<=", "3", "ok"] in rows
    assert bench_mhc.run(SMALL, ["cute_kernels"], time_limit=0.0) == []
    left = "time limit: 20 of 20 cases left, from projection.fwd.24x4x40.bfloat16.streams on"
    assert left in capsys.readouterr().out


def test_products_are_tf32_while_measuring():
    with pytest.raises(KeyError), bench_mhc.tf32_products():
        assert torch.get_float32_matmul_precision() == "high"
        raise KeyError
    assert torch.get_float32_matmul_precision() == "highest"


def test_summary():
    found = [
        ("aggregate", "fwd", "streams", "8192x4x4096", 100.0, 93.0, 1),
        ("aggregate", "fwd", "streams", "4096x4x7168", 100.0, 90.0, 1),
        ("aggregate", "fwd", "streams", "4096x8x4096", 100.0, 90.0, 1),
        ("projection", "fwd", "channels", "4096x8x4096", 100.0, 10.0, 2),
        ("coefficients_sinkhorn", "fwd", "plain", "8192x4", 14.0, 4.0, 2),
        ("coefficients_sinkhorn", "bwd", "plain", "8192x4", 26.0, 4.0, 3),
        ("coefficients_sinkhorn", "bwd", "plain", "4096x4", 14.0, 4.0, 3),
        ("decode", "fwd", "streams", "1x4x7168", 20.0, 5.0, 3),
        ("decode", "fwd", "streams", "16x4x7168", 20.0, 5.0, 4),
    ]
    four, eight, unaimed, forward, backward, decode = bench_mhc.summarize(found)
    assert (four.cases, four.least, four.least_shape) == (2, 0.90, "4096x4x7168")
    assert four.mean == pytest.approx((0.93 * 0.90) ** 0.5)
    assert (four.verdict, eight.verdict, unaimed.verdict) == ("every >= 0.92 --", "every >= 0.85 ok", "-")
    assert (forward.verdict, backward.verdict) == ("8192x4 <= 15 us ok", "8192x4 <= 25 us --")
    assert decode.verdict == "kernels <= 3 --"
    (unknown,) = bench_mhc.summarize([("decode", "fwd", "streams", "1x4x7168", 20.0, 5.0, 0)])
    assert unknown.verdict == "-"  # with --quick nothing is profiled


def test_list_and_filter(capsys):
    assert bench_mhc.main(["--list", "--filter", r"expand_combine.bwd.8192x4x4096.*channels|^decode"]) == 0
    assert capsys.readouterr().out.split() == [
        "expand_combine.bwd.8192x4x4096.bfloat16.channels",
        *(f"decode.fwd.{tokens}x4x7168.bfloat16.streams" for tokens in bench_mhc.DECODE_TOKENS),
    ]


def test_unknown_provider_is_an_error(capsys):
    with pytest.raises(SystemExit):
        bench_mhc.main(["--providers", "cute_kernels,tilekernels"])
    assert "tilekernels" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it would measure")
def test_without_gpu(capsys):
    assert bench_mhc.main([]) == 1
    assert "GPU" in capsys.readouterr().err


def test_speed_table():
    """By op and layout; the eager reference is shown and is no peer."""
    lines, us = [], {"cute_kernels": 10, "torch": 5, "torch_compile": 12, "transformer_engine": 13}
    for connection in bench_mhc.connections():
        for direction in connection.directions:
            for provider, factor in us.items():
                if provider == "transformer_engine" and (connection.layout, connection.n) != ("channels", 4):
                    continue
                result = harness.Result(float(factor), 9.0, 30.0, 5.0, 2**20, {"y": 1.7e-3}, {"a": 6.0, "b": 3.0})
                measurement = harness.Measurement(connection.case(direction), 9.0, {provider: result}, {})
                lines += harness.lines(measurement, ENVIRONMENT)
    text = report.speed_table(report.SECTIONS["mhc"], saved.newest(lines))
    table = rows(text)
    assert table[0][3:] == ["share of the copy", "torch", "torch.compile", "TransformerEngine"]
    numbers = ["8192x4x4096", "**10.0**", "0.900", "0.500", "1.200"]
    assert ["aggregate bwd, channel-major", *numbers, "1.300"] in table
    assert ["aggregate bwd, streams-major", *numbers, "–"] in table
    assert text.endswith("A peer is faster: nowhere.\n")
